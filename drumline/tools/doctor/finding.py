"""A finding of the doctor: one line that names the host or the pair of hosts, and how to fix it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

Level = Literal["problem", "warning", "note"]
JsonObject = dict[str, Any]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class VariableFix:
    """An environment variable to set; without a value: to unset."""

    name: str
    value: str | None = None

    def __str__(self) -> str:
        if self.value is None:
            return f"unset {self.name}"

        quoted = shlex.quote(self.value)
        if quoted.startswith("="):  # which zsh would look up as a command
            quoted = f"'{quoted}'"

        return f"export {self.name}={quoted}"


class Fault(NamedTuple):
    """A finding without what was checked and where, which the caller adds."""

    level: Level
    what: str
    fix: str | VariableFix


@dataclass(frozen=True)
class Finding:
    """A problem must be fixed, a warning may slow or break a run, a note is for information."""

    level: Level
    check: str
    """What was checked, a fixed name for programs: `data ports`, `shared memory`."""
    where: str
    """A host, or a pair of hosts as `a -> b`."""
    what: str
    fix: str = ""
    """What to do or type; a problem always has one."""
    rank: int | None = None
    """The rank that it is about, if any."""
    variable: VariableFix | None = None
    """The fix, where it is one variable."""

    @classmethod
    def of_fault(cls, check: str, where: str, fault: Fault) -> Self:
        """The finding of a fault at a host or a task."""
        variable = fault.fix if isinstance(fault.fix, VariableFix) else None
        return cls(fault.level, check, where, fault.what, str(fault.fix), variable=variable)

    def line(self) -> str:
        """`problem: b -> a: data ports ...`."""
        return f"{self.level}: {self.where}: {self.what}"

    def as_json(self) -> JsonObject:
        """For programs: what is not known is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Problems first, then warnings, then notes."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def has_problems(findings: Iterable[Finding]) -> bool:
    """Whether the doctor exits with code 3."""
    return any(finding.level == "problem" for finding in findings)
