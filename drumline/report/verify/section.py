"""The result of checking one part of a run folder: a summary line, problems and notes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Remark:
    """A problem or a note."""

    part: str
    where: str
    """A path inside the run folder, with a line number if there is one."""
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class Section:
    """What was found in one part."""

    name: str
    summary: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    """Facts that are not problems."""

    def problem(self, where: str, what: str) -> None:
        """Add a problem."""
        self.problems.append(Remark(self.name, where, what))

    def note(self, where: str, what: str) -> None:
        """Add a note."""
        self.notes.append(Remark(self.name, where, what))
