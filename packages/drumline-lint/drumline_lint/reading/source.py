"""One file of Python, or the code of a notebook: text, tree, places and `# noqa` lines; why it
cannot be parsed."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from drumline_lint.findings import UNREADABLE, Finding, Place, Severity, column_of, problem

Silenced = Mapping[int, frozenset[str]]
"""Numbers and names of rules by line, in capitals; an empty set means all."""
Lines = tuple[int, int]
"""The first and the last line of a statement."""

# The number or the name of a rule: `DL012`, `unguarded-save`.
_RULE = r"(?:[A-Z]+[0-9]+|[A-Z]+(?:-[A-Z]+)+)"
_TEST_FOLDERS = {"test", "tests", "unit_tests"}
# The comment that silences the rules of a line, all or some.
_NOQA = re.compile(rf"#\s*noqa(?::\s*(?P<rules>{_RULE}(?:[\s,]+{_RULE})*))?", re.IGNORECASE)


def silenced_lines(text: str, together: Callable[[], Iterable[Lines]]) -> Silenced:
    """For Python or a shell script. A comment on one of the lines `together` applies to all of
    them, as on any line of a call over three lines.
    """
    if "noqa" not in text.lower():
        return {}

    silenced: dict[int, frozenset[str]] = {}
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        if comment := _NOQA.search(line):
            names = re.split(r"[\s,]+", comment["rules"] or "")
            silenced[number] = frozenset(name.upper() for name in names if name)

    return silenced | _spread(silenced, together()) if silenced else {}


def _spread(silenced: Silenced, together: Iterable[Lines]) -> dict[int, frozenset[str]]:
    """For each line of a statement, what is silenced on any of its lines."""
    spread: dict[int, frozenset[str]] = {}

    for first, last in together:
        lines = range(first, last + 1)
        rules = [silenced[line] for line in lines if line in silenced]
        if rules:
            named = frozenset().union(*rules) if all(rules) else frozenset[str]()
            spread |= dict.fromkeys(lines, named)

    return spread


def is_silenced(silenced: Silenced, rule: str, name: str, lines: Lines) -> bool:
    """Whether one of the lines of a finding silences this rule."""
    for line in range(lines[0], lines[1] + 1):
        rules = silenced.get(line)
        if rules is not None and (not rules or rule in rules or name.upper() in rules):
            return True

    return False


@dataclass(frozen=True)
class Cell:
    """Where a notebook's cell begins in the joined text of all cells."""

    number: int
    first_line: int


@dataclass(eq=False)
class Source:
    """Python; what cannot be parsed has none."""

    path: Path
    text: str
    parsed: ast.Module | None = None
    """None before its tree is needed."""
    cells: list[Cell] = field(default_factory=list)
    """The cells of a notebook, in order."""

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed when it is needed first; compact once its file has been indexed."""
        return self.parsed or parse_python(self.text)

    @cached_property
    def folder(self) -> str:
        """The folder that it is in."""
        return str(self.path.parent)

    @cached_property
    def lines(self) -> list[str]:
        """As `ast` counts them: a form feed or a line separator does not end a line."""
        return re.split(r"\r\n|\n|\r", self.text)

    @cached_property
    def silenced(self) -> Silenced:
        """The lines with `# noqa`, on any line of a statement."""
        return silenced_lines(self.text, lambda: _statements(self.tree))

    @cached_property
    def is_test(self) -> bool:
        """By its name, or by one of the two folders around it."""
        name = self.path.name
        if name.startswith("test_") or name.endswith("_test.py"):
            return True
        return not _TEST_FOLDERS.isdisjoint(self.path.parts[-3:-1])

    @property
    def is_notebook(self) -> bool:
        """Whether it is the code of a notebook's cells."""
        return bool(self.cells)

    def place(self, node: ast.AST) -> Place:
        """The place of a node; for a module its first line, and for a node with a body the line
        that opens it."""
        line: int = getattr(node, "lineno", 1)
        column = self._column(line, getattr(node, "col_offset", 0))
        end_line: int = getattr(node, "end_lineno", None) or line
        end_column = self._column(end_line, getattr(node, "end_col_offset", None) or 0)
        if hasattr(node, "body"):
            end_line = line
            end_column = len(self.lines[line - 1]) + 1

        number = None
        before = 0
        if self.cells:
            cell = self.cells[bisect_right(self.cells, line, key=lambda cell: cell.first_line) - 1]
            number = cell.number
            before = cell.first_line - 1

        return Place(
            path=str(self.path),
            cell=number,
            line=line - before,
            column=column,
            end_line=end_line - before,
            end_column=end_column,
        )

    def _column(self, line: int, offset: int) -> int:
        """A column as people count it, from one in bytes."""
        return column_of(self.lines[line - 1], offset)

    def where(self, node: ast.AST) -> str:
        """Its line in words; in a notebook, with the cell."""
        place = self.place(node)
        line = f"line {place.line}"
        return line if place.cell is None else f"cell {place.cell}, {line}"

    def code(self, node: ast.AST) -> str:
        """What is written there, in one line."""
        start = (getattr(node, "lineno", 1), getattr(node, "col_offset", 0))
        end = (getattr(node, "end_lineno", None) or 1, getattr(node, "end_col_offset", None))
        return " ".join(self.between(start, end).split())

    def between(self, start: tuple[int, int], end: tuple[int, int | None]) -> str:
        """The text from one position to another, as `ast` counts them."""
        first_line, first_column = start
        last_line, last_column = end

        written = [line.encode() for line in self.lines[first_line - 1 : last_line]]
        written[-1] = written[-1][:last_column]
        written[0] = written[0][first_column:]
        return b"\n".join(written).decode(errors="replace")


def _statements(tree: ast.Module) -> Iterator[Lines]:
    """The lines of each statement, of one with a body those above it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        last = _line_before(body[0]) if body else node.end_lineno or node.lineno
        if last > node.lineno:
            yield node.lineno, last


def _line_before(inner: ast.AST) -> int:
    """The line above the first statement of a body, or above the first `case`."""
    first: Any = inner.pattern if isinstance(inner, ast.match_case) else inner
    decorators = getattr(first, "decorator_list", [])
    lines: list[int] = [part.lineno for part in (first, *decorators)]
    return min(lines) - 1


CANNOT_PARSE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""The last two are raised for code that is nested too deeply, ValueError for null characters."""


def parse_python(text: str) -> ast.Module:
    """Its tree, without Python's warnings about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


# Syntax by the Python that brought it: a line that has it, where the parser stopped.
_NEWER_SYNTAX = (
    ((3, 12), re.compile(r"\s*type\s+\w+\s*(?:\[.*\])?\s*=|\s*(?:async\s+def|def|class)\s+\w+\s*\[")),
    # quotes of the f-string in one of its expressions
    ((3, 12), re.compile(r""".*\b[fF][rR]?(["'])[^"'\n]*\{[^}\n]*?\1\w""")),
    # an expression of an f-string over several lines
    ((3, 12), re.compile(r""".*\b[fF][rR]?(["'])[^"'\n]*\{[^}"'\n]*$""")),
    # without parentheses; Python 2 has a name in small letters in the second place
    ((3, 14), re.compile(r"\s*except\*?\s+[A-Z][\w.]*(?:\s*,\s*[A-Z][\w.]*)+\s*:")),
    ((3, 14), re.compile(r""".*(?<![\w"'])(?:t|T|rt|tr)["']""")),
)  # fmt: skip


def syntax_problem(error: BaseException, path: Path, *, cell: int | None = None) -> Finding:
    """A note where the file is right, and this Python is too old to read it."""
    if not isinstance(error, SyntaxError):
        is_deep = isinstance(error, RecursionError | MemoryError)
        why = "is nested too deeply to be parsed" if is_deep else f"cannot be parsed: {error}"

        return problem(UNREADABLE, path, f"the code {why}", cell=cell)

    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    newer = _newer_python(error)
    fix = "fix it, or run the linter with the Python that it is for, or leave it out with --exclude"
    if newer:
        message = (
            f"the file was not checked: it has syntax of Python {newer}, and this is Python {this}"
        )
        fix = f"run the linter with Python {newer} or newer"
    elif error.msg.startswith("Missing parentheses in call to"):
        message = f"the code cannot be parsed: {error.msg} (it looks like Python 2)"
        fix = "port it to Python 3, or leave it out with --exclude"
    else:
        message = f"the code cannot be parsed: {error.msg} (read as Python {this})"

    return problem(
        UNREADABLE,
        path,
        message,
        line=max(1, error.lineno or 1),
        column=max(1, error.offset or 1),
        cell=cell,
        fix=fix,
        severity=Severity.NOTE if newer else None,
    )


def _newer_python(error: SyntaxError) -> str:
    """The Python that has the syntax at which the parser stopped: `3.12`; empty if none has."""
    for version, syntax in _NEWER_SYNTAX:
        if sys.version_info < version and syntax.match(error.text or ""):
            return ".".join(map(str, version))

    if error.msg.startswith("f-string expression part cannot include"):
        return "3.12"

    return ""
