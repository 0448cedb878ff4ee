"""Which of the given files an import runs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from drumline_lint.program.files import package_of
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.reading.source import Source


@cached_query
def imported_sources(program: Program, source: Source) -> list[Source]:
    """The given files that a file imports, wherever in it."""
    index = program.index(source)
    statements = [*index.every(ast.Import), *index.every(ast.ImportFrom)]
    names = dict.fromkeys(name for statement in statements for name in _modules(statement))

    modules = [program.module(name, source) for name in names]
    return [module for module in modules if module is not None and module is not source]


def importers(program: Program, source: Source) -> list[Source]:
    """The given files that import a file."""
    return _importers(program)[source]


@cached_query
def _importers(program: Program) -> dict[Source, list[Source]]:
    """The files that import each file."""
    importing: dict[Source, list[Source]] = {source: [] for source in program.sources}

    for source in program.sources:
        for imported in imported_sources(program, source):
            importing[imported].append(source)

    return importing


def with_imported(program: Program, sources: Iterable[Source]) -> set[Source]:
    """Files with all their imports, transitively."""
    reached = set(sources)
    pending = list(reached)

    while pending:
        imported = set(imported_sources(program, pending.pop())) - reached
        reached |= imported
        pending += imported

    return reached


def connected(program: Program, source: Source) -> frozenset[Source]:
    """A file with all files that import it or that it imports, transitively: they may run in one
    process.

    If train.py and test.py import model.py, all three are connected.
    """
    return _components(program)[source]


def calls_near(program: Program, source: Source, *full_names: str) -> list[ast.Call]:
    """All calls of these in a file and in those that are connected with it."""
    return _calls_in_component(program, connected(program, source), full_names)


def any_text_near(program: Program, source: Source, *words: str) -> bool:
    """Whether a file, or one that is connected with it, has one of these words."""
    return _has_word(program, connected(program, source), words)


@cached_query
def _has_word(program: Program, component: frozenset[Source], words: tuple[str, ...]) -> bool:
    """Cached by the component, as below."""
    return any(word in source.text for source in component for word in words)


@cached_query
def _calls_in_component(
    program: Program, component: frozenset[Source], full_names: tuple[str, ...]
) -> list[ast.Call]:
    """Cached by the component: a large one has as many files that ask."""
    return [call for source in component for call in program.calls(source, *full_names)]


@cached_query
def _components(program: Program) -> dict[Source, frozenset[Source]]:
    """The files that are connected with each file, itself included."""
    neighbours: dict[Source, set[Source]] = {source: set() for source in program.sources}
    for source in program.sources:
        for imported in imported_sources(program, source):
            neighbours[source].add(imported)
            neighbours[imported].add(source)

    components: dict[Source, frozenset[Source]] = {}
    for source in program.sources:
        if source in components:
            continue

        component = {source}
        pending = [source]
        while pending:
            added = neighbours[pending.pop()] - component
            component |= added
            pending += added

        components |= dict.fromkeys(component, frozenset(component))

    return components


def _modules(statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """`from a.b import c` runs a, a.b and, if that is a module, a.b.c."""
    for alias in statement.names:
        name = alias.name

        if isinstance(statement, ast.ImportFrom):
            package = "." * statement.level + (statement.module or "")
            joint = "" if package.endswith(".") else "."
            name = package if name == "*" else f"{package}{joint}{name}"

        chain = [name]
        while package := package_of(chain[-1]):
            chain.append(package)

        yield from reversed(chain)
