"""What a rule has to say about one place, and how it could be mended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is: a note may be as meant, a warning costs something, an error breaks the run or its result."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def weight(self) -> int:
        """To compare by."""
        return list(Severity).index(self)


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """Lines count from 1, columns from 1, both as editors do; in a notebook, lines count within the cell."""

    path: str
    cell: int | None = None
    """The number of the notebook's cell, from 1, among all its cells."""
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}:{self.column}"


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Puts a text where another is. Positions are (line, column) of the file's text, as `ast` counts: 1 and 0 first."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake in one place."""

    rule: str
    name: str
    severity: Severity
    place: Place
    message: str
    """What is wrong here, with the names that the code uses, and why it bites."""
    fix: str
    """What to write instead."""
    edits: tuple[Edit, ...] = ()
    """The mend, where it is mechanical. All of them belong together."""
