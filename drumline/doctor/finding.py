"""A finding of the doctor: one line that names the host or the pair of hosts, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["problem", "warning", "note"]
LEVELS: tuple[Level, ...] = ("problem", "warning", "note")
Fault = tuple[Level, str, str]
"""Level, what and fix of a finding; the caller adds what was checked and where."""


@dataclass(frozen=True)
class Finding:
    """A problem must be fixed, a warning may slow or break a run, a note is for information."""

    level: Level
    check: str  # what was checked, a fixed name for programs: `data ports`, `shared memory`
    where: str  # a host, or a pair of hosts as `a -> b`
    what: str
    fix: str = ""  # what to do or type; a problem always has one
    rank: int | None = None  # the rank that it is about, if any

    def line(self) -> str:
        """`problem: b -> a: data ports ...`."""
        return f"{self.level}: {self.where}: {self.what}"

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Problems first, then warnings, then notes."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def has_problems(findings: Iterable[Finding]) -> bool:
    """Whether the doctor exits with code 3."""
    return any(finding.level == "problem" for finding in findings)
