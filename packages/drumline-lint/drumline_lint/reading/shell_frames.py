"""Where in the nesting of shell text a reader is, and the word that is open there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from drumline_lint.reading.shell_parts import Kind, Piece, Word


class Place(Enum):
    """What the text is part of."""

    LIST = "commands"
    ARRAY = "words of an array"
    QUOTES = "double quotes"
    BRACES = "${...}"
    SUM = "((...))"


@dataclass(slots=True)
class Frame:
    """One level of nesting."""

    place: Place
    closer: str = ""
    words: list[Word] = field(default_factory=list)
    start: int = -1
    """Of the open word; -1 when none is open."""
    pieces: list[Piece] = field(default_factory=list)
    is_target: bool = False
    """The next word is what a redirection goes to."""
    after: str = ""
    depth: int = 0
    is_conditional: bool = False
    arrays: dict[int, list[Word]] = field(default_factory=dict)
    brackets: int = 0
    outer: Frame | None = None
    """The level whose word this one is part of; none of a level that has words of its own."""

    @property
    def host(self) -> Frame:
        """The innermost level that has words."""
        return self.outer or self


def joined_pieces(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Texts that follow each other made one, quoted if any of them was; an empty one stands only for an empty word."""
    joined: list[Piece] = []
    run: list[Piece] = []
    for piece in [*pieces, Piece(Kind.UNKNOWN)]:
        if piece.kind is Kind.TEXT:
            run.append(piece)
            continue
        text = "".join(part.text for part in run)
        if text or (run and len(run) == len(pieces)):
            joined.append(Piece(Kind.TEXT, text, any(part.is_quoted for part in run)))
        run = []
        joined.append(piece)
    return tuple(joined[:-1])
