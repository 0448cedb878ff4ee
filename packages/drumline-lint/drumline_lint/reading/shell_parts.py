"""What shell text is made of: commands, their words, and the pieces of a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Of a piece of a word."""

    TEXT = "text"
    VARIABLE = "variable"
    ARRAY = "array"
    """All of an array: `${NAME[@]}`."""
    UNKNOWN = "unknown"
    """What only a run could tell."""


class Piece(NamedTuple):
    """Part of a word: its text, or the name of a variable."""

    kind: Kind
    text: str = ""
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command; offsets count characters of the file's text."""

    start: int
    end: int
    pieces: tuple[Piece, ...]

    @property
    def plain(self) -> str | None:
        """Its text, if nothing in it is expanded."""
        if any(piece.kind is not Kind.TEXT for piece in self.pieces):
            return None
        return "".join(piece.text for piece in self.pieces)

    @property
    def head(self) -> str:
        """The text that it begins with, up to the first thing that is expanded."""
        first = self.pieces[0] if self.pieces else Piece(Kind.TEXT)
        return first.text if first.kind is Kind.TEXT else ""


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command, as it stands."""

    words: tuple[Word, ...]
    after: str
    """The operator before it: `&&`, `||`, `|`, `&`, `;`, a line's end, or nothing."""
    is_conditional: bool
    """Inside an if, a case or a loop, or after && or ||."""
    arrays: Mapping[int, Sequence[Word]]
    """The words of `NAME=(...)`, by where the assignment begins."""

    @property
    def start(self) -> int:
        """Where its first word begins."""
        return self.words[0].start

    @property
    def end(self) -> int:
        """Where its last word ends."""
        return self.words[-1].end
