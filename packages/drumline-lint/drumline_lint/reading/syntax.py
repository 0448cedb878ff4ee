"""Why a text is not Python: what `ast` raises, told with its place."""

from __future__ import annotations

import sys
from pathlib import Path

from drumline_lint.finding import Finding
from drumline_lint.problems import UNREADABLE, problem
from drumline_lint.reading.versions import is_python_2, newer_python

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
