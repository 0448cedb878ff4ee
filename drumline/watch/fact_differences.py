"""In which facts ranks differ, and the message about it. Without torch: the sidecar compares the
ranks of scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.base.errors import PreflightError, as_list, log
from drumline.base.text import by_rank

Facts = Mapping[str, Mapping[str, Any]]
MAX_DIFFERENCES = 8

NEXT_STEPS = {
    "versions": "install the same versions on every node",
    "variables": "set the same environment variables on every node before the ranks start",
    "settings": "start every rank with the same command and settings",
    "code": "use the same code on every node: the same commit, without local changes; if it must differ, "
    "--no-dist.same_code or DDPManager(same_code=False)",
    "arguments": "start the script with the same arguments on every node",
    "packages": "install the same versions on every node",
    "script": "use the same code on every node: the same commit, without local changes",
    "machine": "The slowest GPU slows all ranks, and last bits may differ.",
}

# Groups in which a difference is only a warning.
WARNINGS = {"machine"}

# Groups that list what is loaded: rank 0 may well have imported more than the others.
OF_WHAT_IS_LOADED = {"code", "packages", "script"}


@dataclass(frozen=True)
class Difference:
    """One fact that differs across ranks, with the value of each."""

    group: str
    name: str
    values: Sequence[Any]


def check_differences(everyone: Sequence[Facts], hosts: Sequence[str]) -> None:
    """Raise with the value of each rank, given the facts of all; what may differ is a warning."""
    errors = []
    for difference in differences(everyone):
        if difference.group in WARNINGS:
            values = by_rank(difference.values, hosts)
            log.warning(
                f"ranks differ in {difference.name}: {values}. {NEXT_STEPS[difference.group]}"
            )
        else:
            errors.append(difference)

    if errors:
        text, next_step = described(errors, hosts)
        raise PreflightError(text, next_step=next_step)


def described(differing: Sequence[Difference], hosts: Sequence[str]) -> tuple[str, str]:
    """What differs, with the value of each rank, and what to do about it."""
    lines = [
        f"{difference.name}: {by_rank(difference.values, hosts)}"
        for difference in differing[:MAX_DIFFERENCES]
    ]

    if len(differing) > MAX_DIFFERENCES:
        lines.append(f"and {len(differing) - MAX_DIFFERENCES} more")

    text = lines[0] if len(lines) == 1 else as_list(f"{len(differing)} things:", lines)
    next_steps = dict.fromkeys(NEXT_STEPS[difference.group] for difference in differing)

    return f"ranks differ in {text}", "; ".join(next_steps)


def differences(everyone: Sequence[Facts]) -> list[Difference]:
    """In the order of the groups. A module that some ranks have not loaded is no difference."""
    differing = []
    for group in NEXT_STEPS:
        parts = [facts.get(group, {}) for facts in everyone]
        for name in dict.fromkeys(name for part in parts for name in part):
            values = [part.get(name) for part in parts]
            compared = values
            if group in OF_WHAT_IS_LOADED:
                compared = [value for value in values if value is not None]
            if any(value != compared[0] for value in compared):
                differing.append(Difference(group, name, values))

    return differing
