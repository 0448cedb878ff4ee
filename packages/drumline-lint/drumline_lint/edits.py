"""Edits in a text: where they are, in characters, and the text that they leave."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from drumline_lint.finding import Edit

_LINE_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True)
class Span:
    """Of characters in a text, and what takes their place."""

    start: int
    end: int
    text: str

    def touches(self, other: Span) -> bool:
        """Whether both change the same characters, or put something in the same place."""
        return self.start == other.start or (self.start < other.end and other.start < self.end)


@lru_cache(maxsize=4)
def split_lines(text: str) -> list[str]:
    """As `ast` counts them, without their ends; findings come file by file, so the last ones are kept."""
    return _LINE_END.split(text)


def column_of(line: str, offset: int) -> int:
    """`ast` counts bytes of UTF-8 from 0; editors count characters from 1."""
    return len(line.encode(errors="surrogateescape")[:offset].decode(errors="surrogateescape")) + 1


def spans_of(text: str, edits: Iterable[Edit]) -> list[Span]:
    """Raises ValueError where an edit is not in the text."""
    starts = [0, *(found.end() for found in _LINE_END.finditer(text))]
    lines = split_lines(text)
    newline = found[0] if (found := _LINE_END.search(text)) else "\n"

    def position(line: int, offset: int) -> int:
        if not (
            1 <= line <= len(lines) and 0 <= offset <= len(lines[line - 1].encode(errors="surrogateescape"))
        ):
            raise ValueError(f"there is no line {line} with {offset} bytes")
        return starts[line - 1] + column_of(lines[line - 1], offset) - 1

    spans = [
        Span(position(*edit.start), position(*edit.end), edit.text.replace("\n", newline)) for edit in edits
    ]
    if any(span.end < span.start for span in spans):
        raise ValueError("an edit ends before it begins")
    return spans


def apply_spans(text: str, spans: Sequence[Span]) -> str:
    """They must not touch each other."""
    for span in sorted(spans, key=lambda span: span.start, reverse=True):
        text = text[: span.start] + span.text + text[span.end :]
    return text
