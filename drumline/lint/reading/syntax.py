"""Why a text is not Python: what `ast` raises, told with its place."""

from __future__ import annotations

from pathlib import Path

from drumline.lint.finding import Finding
from drumline.lint.problems import UNREADABLE, problem

CANNOT_PARSE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""The last two are what `ast` says of code that is nested too deeply, the second of what no text can hold."""


def told_syntax(
    error: BaseException, path: Path, *, cell: int | None = None, lines_before: int = 0
) -> Finding:
    """The problem, in the file or in a notebook's cell."""
    if isinstance(error, SyntaxError):
        line, column = max(1, (error.lineno or 1) - lines_before), max(1, error.offset or 1)
        message = f"the code cannot be parsed: {error.msg}"
        return problem(UNREADABLE, path, message, line=line, column=column, cell=cell)
    if isinstance(error, ValueError):
        return problem(UNREADABLE, path, f"the code cannot be parsed: {error}", cell=cell)
    return problem(UNREADABLE, path, "the code is nested too deeply to be parsed", cell=cell)
