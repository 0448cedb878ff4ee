"""Which of the given files an import runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline.lint.program.program import Program, package_of
from drumline.lint.reading.source import Source


def imported_sources(program: Program, source: Source) -> list[Source]:
    """The given files that a file imports, wherever in it."""
    return program.remember(("imports", source), lambda: _imported_anywhere(program, source))


def imported_by(program: Program, statement: ast.Import | ast.ImportFrom) -> Iterator[Source]:
    """The given files that one statement imports: packages before what is in them."""
    source = program.source_of(statement)
    for name in _modules(statement):
        other = program.module(name, source)
        if other is not None and other is not source:
            yield other


def _imported_anywhere(program: Program, source: Source) -> list[Source]:
    index = program.index(source)
    statements = [*index.every(ast.Import), *index.every(ast.ImportFrom)]
    return list(dict.fromkeys(other for one in statements for other in imported_by(program, one)))


def _modules(statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """`from a.b import c` runs a, a.b and, if that is a module, a.b.c."""
    for alias in statement.names:
        name = alias.name
        if isinstance(statement, ast.ImportFrom):
            package = "." * statement.level + (statement.module or "")
            joint = "" if package.endswith(".") else "."
            name = package if name == "*" else f"{package}{joint}{name}"
        every = [name]
        while package := package_of(every[-1]):
            every.append(package)
        yield from reversed(every)
