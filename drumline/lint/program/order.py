"""What a program does first: the runs of its scripts, and of functions that nobody calls, call by call."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

from drumline.lint.program.distributed import distributed_sources
from drumline.lint.program.imports import imported_sources
from drumline.lint.program.program import Program
from drumline.lint.program.tree import function_around, position
from drumline.lint.program.walk import Step, is_for_script, walk
from drumline.lint.reading.source import Source

Run: TypeAlias = list[Step]
Found = TypeVar("Found")
Finds: TypeAlias = Callable[[Program, Run], Iterable[tuple[ast.AST, Found]]]


def runs(program: Program, source: Source) -> list[list[ast.Call]]:
    """Of a file: what it does when it is run, and what each function does that nobody calls."""
    return [[step.call for step in run] for run in (script(program, source), *loose(program, source)) if run]


def runs_through(program: Program, source: Source) -> list[Run]:
    """All runs, of whichever distributed file, that come through a file; those of scripts first."""
    return program.remember("runs through", lambda: _runs_by_source(program)).get(source, [])


def scripts_through(program: Program, source: Source) -> list[Run]:
    """Those of them that are whole: what a script does, or a `main` that nobody calls."""
    return program.remember("scripts through", lambda: _scripts_by_source(program)).get(source, [])


def found_in_scripts(program: Program, source: Source, find: Finds[Found]) -> dict[ast.AST, Found]:
    """What is found in a file by looking through all runs of scripts, each once, whoever asks."""
    return program.remember(("found", find), lambda: _find_in_scripts(program, find)).get(source, {})


def script(program: Program, source: Source) -> Run:
    """What a file does when it is run; nothing for one that only defines."""
    return program.remember(
        ("script", source), lambda: list(walk(program, source, program.tree(source).body))
    )


def loose(program: Program, source: Source) -> list[Run]:
    """What each function does that nobody calls."""
    return program.remember(("loose", source), lambda: _find_loose(program, source))


def process_of(program: Program, step: Step) -> tuple[ast.AST, ...]:
    """The calls that started the process in which it happens; of a script's own, nothing."""
    return tuple(one for one in step.through if isinstance(one, ast.Call) and program.started(one))


def parting(one: Step, other: Step) -> tuple[ast.AST, ast.AST]:
    """The two places of one function in which the ways to two steps part."""
    ways = [(*step.through, step.call) for step in (one, other)]
    for left, right in zip(*ways, strict=False):
        if left is not right:
            return left, right
    return one.call, other.call


def _find_loose(program: Program, source: Source) -> list[Run]:
    index = program.index(source)
    functions = [*index.every(ast.FunctionDef), *index.every(ast.AsyncFunctionDef)]
    runs_of_each = [_run_if_loose(program, one) for one in sorted(functions, key=position)]
    return [run for run in runs_of_each if run]


def _run_if_loose(program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Run:
    """What a function does, if neither its file nor anybody else calls it."""
    source = program.source_of(function)
    done = program.remember(
        ("done", source), lambda: {function_around(step.call) for step in script(program, source)}
    )
    if function in done or program.callers(function):
        return []
    return list(walk(program, source, function.body, function))


def _runs_by_source(program: Program) -> dict[Source, list[Run]]:
    found: dict[Source, list[Run]] = defaultdict(list)
    for source in _in_order(program):
        _sort(program, [script(program, source)], found)
    for source in _in_order(program):
        _sort(program, loose(program, source), found)
    return found


def _find_in_scripts(program: Program, find: Finds[Found]) -> dict[Source, dict[ast.AST, Found]]:
    found: dict[Source, dict[ast.AST, Found]] = defaultdict(dict)
    for run in _scripts(program):
        for node, what in find(program, run):
            found[program.source_of(node)].setdefault(node, what)
    return found


def _scripts_by_source(program: Program) -> dict[Source, list[Run]]:
    found: dict[Source, list[Run]] = defaultdict(list)
    _sort(program, _scripts(program), found)
    return found


def _scripts(program: Program) -> list[Run]:
    return program.remember("scripts", lambda: list(_find_scripts(program)))


def _find_scripts(program: Program) -> Iterator[Run]:
    """A file that others import is no script, unless it says so: what it does is part of their runs."""
    every = _in_order(program)
    imported = {other for source in every for other in imported_sources(program, source)}
    for source in every:
        if source not in imported or any(map(is_for_script, source.tree.body)):
            yield script(program, source)
        yield from (_run_if_loose(program, main) for main in _mains(program, source))


def _mains(program: Program, source: Source) -> list[ast.FunctionDef]:
    """`main` that nobody calls is called by a package's entry point."""
    functions = [one for one in program.tree(source).body if isinstance(one, ast.FunctionDef)]
    return [one for one in functions if one.name == "main"]


def _sort(program: Program, every: list[Run], found: dict[Source, list[Run]]) -> None:
    for run in every:
        for source in {program.source_of(step.call): None for step in run}:
            found[source].append(run)


def _in_order(program: Program) -> list[Source]:
    distributed = distributed_sources(program)
    return [source for source in program.sources if source in distributed]
