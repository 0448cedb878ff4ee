"""One file of Python, or the code of one notebook: its text, tree and places, and what it asks to be left alone."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from drumline_lint.finding import Place
from drumline_lint.reading.noqa import Lines, Silenced, silenced_lines


@dataclass(frozen=True)
class Cell:
    """Where a notebook's cell begins in the text that all of its code makes."""

    number: int
    first_line: int


@dataclass(eq=False)
class Source:
    """Python that could be parsed."""

    path: Path
    text: str
    tree: ast.Module
    cells: list[Cell] = field(default_factory=list)
    """Of a notebook, in order."""

    @cached_property
    def lines(self) -> list[str]:
        """As `ast` counts them: a form feed or a line separator ends none."""
        return re.split(r"\r\n|\n|\r", self.text)

    @cached_property
    def silenced(self) -> Silenced:
        """The lines that say `# noqa`, on any line of a statement."""
        return silenced_lines(self.text, lambda: _statements(self.tree))

    @property
    def is_notebook(self) -> bool:
        """Its text is not that of the file."""
        return bool(self.cells)

    def place(self, node: ast.AST) -> Place:
        """Of a node; a module is at its first line, and of what has a body it is the line that opens it."""
        line: int = getattr(node, "lineno", 1)
        end_line: int = getattr(node, "end_lineno", None) or line
        column = self._column(line, getattr(node, "col_offset", 0))
        end_column = self._column(end_line, getattr(node, "end_col_offset", None) or 0)
        if hasattr(node, "body"):
            end_line, end_column = line, len(self.lines[line - 1]) + 1
        number, before = None, 0
        if self.cells:
            cell = self.cells[bisect_right(self.cells, line, key=lambda cell: cell.first_line) - 1]
            number, before = cell.number, cell.first_line - 1
        return Place(
            path=str(self.path),
            cell=number,
            line=line - before,
            column=column,
            end_line=end_line - before,
            end_column=end_column,
        )

    def code(self, node: ast.AST) -> str:
        """What is written there, on one line."""
        first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", None) or 1
        start, end = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", None)
        written = [line.encode() for line in self.lines[first - 1 : last]]
        written[-1] = written[-1][:end]
        written[0] = written[0][start:]
        return " ".join(b" ".join(written).decode(errors="replace").split())

    def _column(self, line: int, offset: int) -> int:
        """`ast` counts bytes of UTF-8 from 0."""
        return len(self.lines[line - 1].encode()[:offset].decode(errors="ignore")) + 1


def _statements(tree: ast.Module) -> Iterator[Lines]:
    """Of what has a body, the lines above it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            last = node.end_lineno or node.lineno
            if inner := [
                line for name in ("body", "cases") for line in _first_lines(getattr(node, name, []))
            ]:
                last = min(inner) - 1
            if last > node.lineno:
                yield node.lineno, last


def _first_lines(body: list[ast.stmt] | list[ast.match_case]) -> Iterator[int]:
    for inner in body[:1]:
        first = inner.pattern if isinstance(inner, ast.match_case) else inner
        yield from (node.lineno for node in (first, *getattr(first, "decorator_list", [])))
