"""What a check found: a line on what was looked at, the problems, and what is worth a note."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Remark:
    """Something to tell, and where it is."""

    part: str
    where: str
    """A path inside the run folder, with a line where there is one."""
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class Section:
    """One part of a run folder, checked."""

    name: str
    summary: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[Remark] = field(default_factory=list)
    """What is wrong: each makes the run one that is not whole."""
    notes: list[Remark] = field(default_factory=list)
    """What is as it may be, but good to know."""

    def problem(self, where: str, what: str) -> None:
        self.problems.append(Remark(self.name, where, what))

    def note(self, where: str, what: str) -> None:
        self.notes.append(Remark(self.name, where, what))
