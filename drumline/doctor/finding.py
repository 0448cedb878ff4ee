"""What the doctor found: one sentence with the host or the edge in it, and what to type to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["problem", "warning", "note"]
ORDER: tuple[Level, ...] = ("problem", "warning", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that must be mended (problem), may hurt (warning), or is good to know (note)."""

    level: Level
    check: str
    """What was looked at, in a word or two that stay the same: `data ports`, `shared memory`."""
    where: str
    """A host, or an edge as `a -> b`."""
    what: str
    fix: str = ""
    """What to do or type; a problem always has one."""

    def line(self) -> str:
        """`problem: b -> a: data ports: ...`."""
        return f"{self.level}: {self.where}: {self.what}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """What must be mended first; otherwise as they came."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.level))


def must_be_mended(findings: Iterable[Finding]) -> bool:
    """Whether the doctor ends with exit code 3."""
    return any(finding.level == "problem" for finding in findings)
