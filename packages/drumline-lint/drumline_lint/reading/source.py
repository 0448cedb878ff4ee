"""One file of Python, or the code of a notebook: text, tree, places and `# noqa` lines; why it cannot be parsed."""

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

from drumline_lint.findings import UNREADABLE, Finding, Place, problem

Silenced = Mapping[int, frozenset[str]]
"""Numbers and names of rules by line, in capitals; none named means all."""
Lines = tuple[int, int]
"""The first and the last of some that belong together."""

_RULE = r"(?:[A-Z]+[0-9]+|[A-Z]+(?:-[A-Z]+)+)"
_NOQA = re.compile(rf"#\s*noqa(?::\s*(?P<rules>{_RULE}(?:[\s,]+{_RULE})*))?", re.IGNORECASE)


def silenced_lines(text: str, together: Callable[[], Iterable[Lines]]) -> Silenced:
    """Of Python or of a shell script. What is said on one of the lines `together` is said of all of them."""
    if "noqa" not in text.lower():
        return {}
    silenced: dict[int, frozenset[str]] = {}
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        if found := _NOQA.search(line):
            named = re.split(r"[\s,]+", found["rules"] or "")
            silenced[number] = frozenset(name.upper() for name in named if name)
    return silenced | _spread(silenced, together()) if silenced else {}


def _spread(silenced: Silenced, together: Iterable[Lines]) -> dict[int, frozenset[str]]:
    spread: dict[int, frozenset[str]] = {}
    for first, last in together:
        lines = range(first, last + 1)
        said = [silenced[line] for line in lines if line in silenced]
        if said:
            named = frozenset().union(*said) if all(said) else frozenset[str]()
            spread |= dict.fromkeys(lines, named)
    return spread


def is_silenced(silenced: Silenced, rule: str, name: str, lines: Lines) -> bool:
    """Whether one of the lines on which it was found asks this rule to leave it alone."""
    return any(
        line in silenced and (not silenced[line] or not silenced[line].isdisjoint({rule, name.upper()}))
        for line in range(lines[0], lines[1] + 1)
    )


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


FARTHEST = 500
"""So much of a line is looked at: who writes by hand writes no more."""
MOST_ENDS = 20
EXCEPT = "multiple exception types must be parenthesized"

_PARAMETERS = r"\[\s*\*{0,2}[A-Za-z_]\w*\s*(?:[,:=].*)?\]\s*"
_OPENED = r"^\s*(?:(?:async\s+)?def|class)\s+\w+\s*"
# What the line at fault looks like; parsing ends where the match ends.
_NEWER = (
    (rf"{_OPENED}(?=\[[^\]()]*[\w\s]=[\w\s].*\]\s*[(:])", "defaults of type parameters are", (3, 13)),
    (rf"{_OPENED}\[[^\]()=]*(?==[^=].*\]\s*[(:])", "defaults of type parameters are", (3, 13)),
    (rf"^\s*(?:async\s+)?def\s+\w+\s*(?={_PARAMETERS}\()", "type parameters are", (3, 12)),
    (rf"^\s*class\s+\w+\s*(?={_PARAMETERS}[(:])", "type parameters are", (3, 12)),
    (r"^\s*type\s+(?=\w+\s*(?:\[.+\]\s*)?=[^=])", "the type statement is", (3, 12)),
    (r"(?i)\b(?:t|rt|tr)(?=[\"'])", "a t-string is", (3, 14)),
    (r"^\s*lazy\s+(?=import\s+\w|from\s+[.\w]+\s+import\s+[\w(*])", "a lazy import is", (3, 15)),
)
_PYTHON_2 = (
    r"\braise\s+[\w.]+\s*(?=,\s*\S)",
    r"(?<![\w.])(?=0[0-7]{3}\b)",
    r"\b\d*(?=\d[lL]\b)",
    r"(?=<>)",
    r"(?:[=(,+%\[]|\breturn|\bprint)\s*(?=`[^`]+`)",
    r"(?i)\bur(?=[\"'])",
)
# In Python 2 the last name gets the exception; in newer ones it is one more kind of exception.
_OLD_EXCEPT = r"\bexcept\s*(?:[\w.]+|\([^()]*\))\s*,\s*(?:_*[a-z]\w*|\([\w\s,]+\))\s*:"
_NEW_EXCEPT = r"\bexcept\*?\s+(?:[\w.]+\s*,\s*)+(?:[\w.]*\.\w+|_*[A-Z]\w*)\s*:"
_F_STRING = r"(?i)(?<!\w)(?:f|rf|fr)([\"'])(?!\1\1)"
_FORMAT = r"\s*=?\s*(?:![rsa])?(?::[^\"']*)?$"


def newer_python(error: SyntaxError) -> tuple[str, tuple[int, int]] | None:
    """What is written there that a newer Python than this one reads, and which; nothing where that is not likely."""
    found = _newer(error)
    return None if found is None or sys.version_info >= found[1] else found


def _newer(error: SyntaxError) -> tuple[str, tuple[int, int]] | None:
    line = _line(error)
    for pattern, what, version in _NEWER:
        if _ends_there(pattern, line, error):
            return what, version
    if error.msg == EXCEPT and re.search(_NEW_EXCEPT, line):
        return "except without parentheses is", (3, 14)
    if error.msg.startswith("f-string expression part cannot include a backslash"):
        return "a backslash between an f-string's braces is", (3, 12)
    if any(_has_own_quotes(line, opening.end(), opening[1]) for opening in re.finditer(_F_STRING, line)):
        return "an f-string with its own quotes inside is", (3, 12)
    return None


def is_python_2(error: SyntaxError) -> bool:
    """Whether it is a way to write that only Python 2 had."""
    line = _line(error)
    if re.match(r"Missing parentheses in call to '(?:print|exec)'", error.msg):
        return True
    if error.msg == EXCEPT:
        return re.search(_OLD_EXCEPT, line) is not None
    return any(_ends_there(pattern, line, error) for pattern in _PYTHON_2)


def _line(error: SyntaxError) -> str:
    return (error.text or "")[:FARTHEST]


def _ends_there(pattern: str, line: str, error: SyntaxError) -> bool:
    return any(found.end() + 1 == error.offset for found in re.finditer(pattern, line))


def _has_own_quotes(line: str, at: int, quote: str) -> bool:
    """Whether there is an expression between the braces of an f-string that has its quote in it."""
    while at < len(line) and line[at] != quote:
        if line[at] == "\\" or line.startswith("{{", at):
            at += 2
        elif line[at] == "{":
            inner = _between_braces(line, at + 1)
            if not inner or quote in inner:
                return bool(inner)
            at += len(inner) + 2
        else:
            at += 1
    return False


def _between_braces(line: str, start: int) -> str:
    """Up to the first brace that leaves an expression before it."""
    ends = (found.start() for found in re.finditer("}", line[start:]))
    for end, _ in zip(ends, range(MOST_ENDS), strict=False):
        inner = line[start : start + end]
        if _is_expression((inner, re.sub(_FORMAT, "", inner))):
            return inner
    return ""


def _is_expression(texts: Iterable[str]) -> bool:
    for text in texts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return True
    return False


CANNOT_PARSE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""The last two are what `ast` says of code that is nested too deeply, the second of what no text can hold."""


def told_syntax(
    error: BaseException, path: Path, *, cell: int | None = None, lines_before: int = 0
) -> Finding:
    """The problem, in the file or in a notebook's cell."""
    if isinstance(error, SyntaxError):
        line, column = max(1, (error.lineno or 1) - lines_before), max(1, error.offset or 1)
        hint, fix = _of_other_python(error)
        message = f"the code cannot be parsed: {error.msg}{hint}"
        return problem(UNREADABLE, path, message, line=line, column=column, cell=cell, fix=fix)
    if isinstance(error, ValueError):
        return problem(UNREADABLE, path, f"the code cannot be parsed: {error}", cell=cell)
    return problem(UNREADABLE, path, "the code is nested too deeply to be parsed", cell=cell)


def _of_other_python(error: SyntaxError) -> tuple[str, str]:
    """What to say, and what to do, where the code is likely to be for another Python."""
    if (found := newer_python(error)) is not None:
        what, (major, minor) = found
        this = f"{sys.version_info.major}.{sys.version_info.minor}"
        hint = f" ({what} read by Python {major}.{minor} and newer, and this is Python {this})"
        return hint, f"run drumline with the Python that the code is for, {major}.{minor} or newer"
    if is_python_2(error):
        return " (it looks like Python 2)", "port it to Python 3, or leave it out with --exclude"
    return "", ""
