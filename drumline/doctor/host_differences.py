"""What differs across the hosts of one job: versions, GPUs, packages, variables, code and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from drumline.doctor.comparison import Comparison, compare
from drumline.doctor.finding import Finding, Level
from drumline.doctor.folder_differences import compare_code, compare_data
from drumline.text import join_names, plural

Facts = Mapping[str, Any]
MAX_PACKAGES = 10
MAX_FINDINGS = 5
SAME_ENVIRONMENT = (
    "install the same on all hosts: pip freeze > all.txt on one, pip install -r all.txt on the others"
)
# Ranks for which these differ wait for each other, or fail to connect.
MUST_AGREE = {
    "FI_PROVIDER",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_COMM_ID",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_FAMILY",
    "TORCH_DISTRIBUTED_DEBUG",
}
COMPARED = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "FI_PROVIDER")
# Those that name a part of one machine, or only log.
MAY_DIFFER = (
    "NCCL_CONF_FILE",
    "NCCL_DEBUG",
    "NCCL_GRAPH_",
    "NCCL_HOSTID",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TOPO_",
    "TORCH_NCCL_DEBUG_INFO",
)


class Trait(NamedTuple):
    """One thing that hosts should share."""

    name: str
    of: Callable[[Facts], str | None]
    level: Level
    fix: str


def _gpus(facts: Facts) -> str | None:
    names = [gpu["name"] for gpu in facts["gpus"]]
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))) or None


def _mtu(facts: Facts) -> str | None:
    chosen = facts["nccl_interface"] if facts["gpus"] else facts["gloo_interface"]
    return next((str(one["mtu"]) for one in facts["interfaces"] if one["name"] == chosen), None)


TRAITS = (
    Trait("Python", lambda facts: facts["python"], "warning", SAME_ENVIRONMENT),
    Trait("torch", lambda facts: facts["torch"], "problem", SAME_ENVIRONMENT),
    Trait("CUDA (of torch)", lambda facts: facts["cuda"], "problem", SAME_ENVIRONMENT),
    Trait("NCCL", lambda facts: facts["nccl"], "problem", SAME_ENVIRONMENT),
    Trait("drumline", lambda facts: facts["packages"].get("drumline"), "problem", SAME_ENVIRONMENT),
    Trait("driver", lambda facts: facts["driver"], "warning", "install the same driver on all hosts"),
    Trait("GPUs", _gpus, "warning", "leave the odd hosts out, or set slots per host: --hosts a:8,b:4"),
    Trait(
        "architecture",
        lambda facts: facts["platform"].split()[-1],
        "warning",
        "use hosts of one architecture",
    ),
    Trait(
        "file system of the run folder",
        lambda facts: facts["disk"].get("file_system"),
        "warning",
        "check that the shared volume is mounted on all hosts (mount)",
    ),
    Trait("MTU", _mtu, "warning", "set the same on all hosts: ip link set dev NAME mtu 1500"),
)


def compare_hosts(facts: Mapping[str, Facts]) -> tuple[list[Finding], list[Comparison]]:
    """Findings, and everything that was compared, from the facts of each host."""
    findings: list[Finding] = []
    compared: list[Comparison] = []
    for trait in TRAITS:
        values = compare(trait.name, {host: trait.of(one) for host, one in facts.items()})
        compared.append(values)
        if values.differs:
            findings.append(values.finding(_level(trait, facts), trait.fix))
    for part in (_compare_packages, _compare_variables, compare_code, compare_data):
        found, more = part(facts)
        findings += found
        compared += more
    return findings, compared


def _level(trait: Trait, facts: Mapping[str, Facts]) -> Level:
    """Pythons that differ only in their last number work together."""
    minors = {tuple(one["python"].split(".")[:2]) for one in facts.values()}
    return "problem" if trait.name == "Python" and len(minors) > 1 else trait.level


def _compare_packages(facts: Mapping[str, Facts]) -> tuple[list[Finding], list[Comparison]]:
    """One finding per set of odd hosts, so that an old environment is one line and not forty."""
    names = sorted({name for one in facts.values() for name in one["packages"]} - {"torch", "drumline"})
    rows = [compare(name, {host: one["packages"].get(name) for host, one in facts.items()}) for name in names]
    rows = [row for row in rows if row.differs]
    by_hosts: dict[tuple[str, ...], list[Comparison]] = {}
    for row in rows:
        by_hosts.setdefault(row.odd_hosts, []).append(row)
    # Most differences first; a package that differs everywhere says the least.
    ordered = sorted(by_hosts.items(), key=lambda item: (-len(item[1]), len(item[0])))
    findings = []
    for hosts, found in ordered[:MAX_FINDINGS]:
        shown = "; ".join(f"{row.name} {row.text()}" for row in found[:MAX_PACKAGES])
        more = f"; and {len(found) - MAX_PACKAGES} more" if len(found) > MAX_PACKAGES else ""
        verb = "differs" if len(found) == 1 else "differ"
        what = f"{plural(len(found), 'package')} {verb} across hosts: {shown}{more}"
        fix = "pip freeze > all.txt on a host that is right, pip install -r all.txt on these"
        findings.append(Finding("warning", "differences", join_names(hosts), what, fix))
    return findings, rows


def _compare_variables(facts: Mapping[str, Facts]) -> tuple[list[Finding], list[Comparison]]:
    every = {name for one in facts.values() for name in one["variables"]}
    names = sorted(name for name in every if name.startswith(COMPARED) and not name.startswith(MAY_DIFFER))
    findings, rows = [], []
    for name in names:
        row = compare(name, {host: one["variables"].get(name) for host, one in facts.items()}, unset="unset")
        rows.append(row)
        if row.differs:
            same = f"unset {name}" if row.usual == "unset" else f"export {name}={row.usual}"
            fix = f"{same} on all hosts, or in the environment of the launcher"
            findings.append(row.finding("problem" if name in MUST_AGREE else "warning", fix))
    return findings, rows
