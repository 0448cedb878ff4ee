"""What differs between hosts that are about to run one job: versions, GPUs, packages, variables, code and data. Each
difference names the odd hosts out; what agrees is in the table all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from drumline.doctor.compare_folders import compare_code, compare_data
from drumline.doctor.compare_packages import compare_packages, compare_variables
from drumline.doctor.finding import Finding, Level
from drumline.doctor.groups import Row, row_of

Facts = Mapping[str, Any]
SAME_ENVIRONMENT = (
    "install the same on all of them: pip freeze > all.txt on one, pip install -r all.txt on the others"
)


class Trait(NamedTuple):
    """One thing that hosts should share."""

    name: str
    of: Callable[[Facts], str | None]
    level: Level
    fix: str


def _gpus(facts: Facts) -> str | None:
    models: dict[str, int] = {}
    for gpu in facts["gpus"]:
        models[gpu["name"]] = models.get(gpu["name"], 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in sorted(models.items())) or None


def _mtu(facts: Facts) -> str | None:
    chosen = facts["nccl_interface"] if facts["gpus"] else facts["gloo_interface"]
    return next((str(one["mtu"]) for one in facts["interfaces"] if one["name"] == chosen), None)


TRAITS = (
    Trait("Python", lambda facts: facts["python"], "warning", SAME_ENVIRONMENT),
    Trait("torch", lambda facts: facts["torch"], "problem", SAME_ENVIRONMENT),
    Trait("CUDA (of torch)", lambda facts: facts["cuda"], "problem", SAME_ENVIRONMENT),
    Trait("NCCL", lambda facts: facts["nccl"], "problem", SAME_ENVIRONMENT),
    Trait("drumline", lambda facts: facts["packages"].get("drumline"), "problem", SAME_ENVIRONMENT),
    Trait("driver", lambda facts: facts["driver"], "warning", "install the same driver on all of them"),
    Trait("GPUs", _gpus, "warning", "leave the odd ones out, or give each host its slots: --hosts a:8,b:4"),
    Trait("kind of machine", lambda facts: facts["platform"].split()[-1], "warning", "use one kind"),
    Trait(
        "file system of the run folder",
        lambda facts: facts["disk"].get("file_system"),
        "warning",
        "see whether the shared volume is mounted on all of them (mount)",
    ),
    Trait("MTU", _mtu, "warning", "set one for all: ip link set dev NAME mtu 1500"),
)


def compare_facts(facts: Mapping[str, Facts]) -> tuple[list[Finding], list[Row]]:
    """Findings and the table, from what each host told of itself."""
    findings: list[Finding] = []
    rows: list[Row] = []
    for trait in TRAITS:
        row = row_of(trait.name, {host: trait.of(one) for host, one in facts.items()})
        rows.append(row)
        if row.differs:
            findings.append(row.finding(_level(trait, facts), trait.fix))
    for part in (compare_packages, compare_variables, compare_code, compare_data):
        found, more = part(facts)
        findings += found
        rows += more
    return findings, rows


def _level(trait: Trait, facts: Mapping[str, Facts]) -> Level:
    """Pythons that differ in their last number get on with each other; others bring other packages."""
    if trait.name == "Python" and len({tuple(one["python"].split(".")[:2]) for one in facts.values()}) > 1:
        return "problem"
    return trait.level


def differing(rows: list[Row]) -> Iterator[Row]:
    """The lines that a screen has room for."""
    return (row for row in rows if row.differs)
