"""Calls: their arguments, and those of a library's functions."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

from drumline_lint.program import names
from drumline_lint.program.queries import ProgramView, cached_query
from drumline_lint.program.tree import enclosing_class, last_name, position
from drumline_lint.reading.source import Source


def argument(call: ast.Call, number: int | None, name: str) -> ast.expr | None:
    """What is given for a parameter, by name or by position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if number is None or not 0 <= number < len(call.args):
        return None
    before = call.args[: number + 1]
    return None if any(isinstance(value, ast.Starred) for value in before) else call.args[number]


def has_unknown_arguments(call: ast.Call) -> bool:
    """Whether `*args` or `**kwargs` may give more than is written."""
    return any(isinstance(value, ast.Starred) for value in call.args) or any(
        k.arg is None for k in call.keywords
    )


def is_instance(function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg) -> bool:
    """Whether it is a method's `self`."""
    every = [*function.args.posonlyargs, *function.args.args]
    return _is_method(function) and bool(every) and every[0] is parameter


def number_of(function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg) -> int | None:
    """Its position for callers; `self` is not counted."""
    every = [*function.args.posonlyargs, *function.args.args]
    return every.index(parameter) - _is_method(function) if parameter in every else None


def default_of(
    function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg
) -> ast.expr | None:
    """Its default value."""
    every = [*function.args.posonlyargs, *function.args.args]
    defaults = dict(zip(reversed(every), reversed(function.args.defaults), strict=False))
    named = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    defaults |= {keyword: default for keyword, default in named if default is not None}
    return defaults.get(parameter)


def _is_method(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    is_static = any(last_name(decorator) == "staticmethod" for decorator in function.decorator_list)
    return enclosing_class(function) is not None and not is_static


def calls_in_all(program: ProgramView, full_names: tuple[str, ...]) -> Iterator[ast.Call]:
    """All calls of these in all given files."""
    for source in program.files.sources:
        yield from program.calls(source, *full_names)


def calls_in(
    program: ProgramView, source: Source, full_names: tuple[str, ...]
) -> Iterator[ast.Call]:
    """All calls of these in a file, by the library's full name, in the order of the text."""
    by_last = _by_last_name(full_names)
    calls = program.files.index(source).calls
    matching = [
        call
        for last in by_last
        for call in calls.get(last, ())
        if program.name_of(call.func) in by_last[last]
    ]
    for alias in aliases(program, source, (*by_last, *full_names)) - by_last.keys():
        matching += [
            call for call in calls.get(alias, ()) if program.name_of(call.func) in full_names
        ]
    return iter(sorted(matching, key=position))


@cache
def _by_last_name(full_names: tuple[str, ...]) -> dict[str, set[str]]:
    by_last: dict[str, set[str]] = defaultdict(set)
    for name in full_names:
        by_last[name.rpartition(".")[2]].add(name)
    return by_last


def aliases(program: ProgramView, source: Source, meanings: Iterable[str]) -> set[str]:
    """A file's other names for them: `from torch.nn.parallel import DistributedDataParallel as
    DDP`."""
    every = _all_aliases(program, source)
    return set().union(*(every[name] for name in meanings if name in every))


@cached_query
def _all_aliases(program: ProgramView, source: Source) -> dict[str, set[str]]:
    """By the full name of what is imported, and by the last name of what is assigned."""
    by_meaning: dict[str, set[str]] = defaultdict(set)
    for scope in program.files.index(source).scopes.values():
        for name, bindings in scope.names.items():
            for binding in bindings:
                if binding.imported:
                    by_meaning[names.canonical(binding.imported)].add(name)
                elif (
                    isinstance(binding.value, (ast.Attribute, ast.Name))
                    and binding.kind == "assign"
                ):
                    by_meaning[last_name(binding.value)].add(name)
    return by_meaning
