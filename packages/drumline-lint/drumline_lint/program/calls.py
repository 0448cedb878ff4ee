"""Calls: their arguments, and those of a library's functions."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import cache

from drumline_lint.program import names
from drumline_lint.program.queries import ProgramView, cached_query
from drumline_lint.program.tree import NamedFunction, enclosing_class, last_name, position
from drumline_lint.reading.source import Source


def argument(call: ast.Call, number: int | None, name: str) -> ast.expr | None:
    """What is given for a parameter, by name or by position.

    For the parameter `dim` with number 1 it is `0` in `cat(tensors, 0)` and in `cat(dim=0)`.
    """
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value

    if number is None or not 0 <= number < len(call.args):
        return None

    if any(isinstance(value, ast.Starred) for value in call.args[: number + 1]):
        return None

    return call.args[number]


def has_unknown_arguments(call: ast.Call) -> bool:
    """Whether `*args` or `**kwargs` may give more than is written."""
    has_star = any(isinstance(value, ast.Starred) for value in call.args)
    return has_star or any(keyword.arg is None for keyword in call.keywords)


def is_instance(function: NamedFunction, parameter: ast.arg) -> bool:
    """Whether it is a method's `self`."""
    return number_of(function, parameter) == -1


def number_of(function: NamedFunction, parameter: ast.arg) -> int | None:
    """Its position for callers; `self` is not counted. None for one that is given by name only."""
    parameters = positional_parameters(function)
    if parameter not in parameters:
        return None

    return parameters.index(parameter) - _is_method(function)


def positional_parameters(function: NamedFunction) -> list[ast.arg]:
    """The parameters that can be given by position, in their order."""
    return [*function.args.posonlyargs, *function.args.args]


def default_of(function: NamedFunction, parameter: ast.arg) -> ast.expr | None:
    """Its default value."""
    arguments = function.args
    defaults = dict(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))

    # Of the others, the last have defaults.
    from_last = reversed(positional_parameters(function))
    defaults.update(zip(from_last, reversed(arguments.defaults), strict=False))
    return defaults.get(parameter)


def _is_method(function: NamedFunction) -> bool:
    """Whether its first parameter is `self` or `cls`."""
    is_static = any(last_name(decorator) == "staticmethod" for decorator in function.decorator_list)
    return enclosing_class(function) is not None and not is_static


def calls_in(program: ProgramView, source: Source, full_names: tuple[str, ...]) -> list[ast.Call]:
    """All calls of these in a file, by the library's full name, in the order of the text."""
    by_last = _by_last_name(full_names)
    calls = program.files.index(source).calls
    renamed = aliases(program, source, (*by_last, *full_names)) - by_last.keys()
    matching: list[ast.Call] = []

    for written in (*by_last, *renamed):
        meanings = by_last.get(written, full_names)
        for call in calls.get(written, ()):
            if program.name_of(call.func) in meanings:
                matching.append(call)

    return sorted(matching, key=position)


@cached_query
def calls_in_all(program: ProgramView, full_names: tuple[str, ...]) -> list[ast.Call]:
    """All calls of these in all given files."""
    sources = program.files.sources
    return [call for source in sources for call in program.calls(source, *full_names)]


@cache
def _by_last_name(full_names: tuple[str, ...]) -> dict[str, set[str]]:
    """`torch.distributed.barrier` by `barrier`."""
    by_last: dict[str, set[str]] = defaultdict(set)
    for name in full_names:
        by_last[name.rpartition(".")[2]].add(name)
    return by_last


def aliases(program: ProgramView, source: Source, meanings: Iterable[str]) -> set[str]:
    """A file's other names for them.

    `DDP` after `from torch.nn.parallel import DistributedDataParallel as DDP`, or after
    `DDP = torch.nn.parallel.DistributedDataParallel`.
    """
    by_meaning = _all_aliases(program, source)
    return set().union(*(by_meaning[name] for name in meanings if name in by_meaning))


_NAMES = (ast.Attribute, ast.Name)


@cached_query
def _all_aliases(program: ProgramView, source: Source) -> dict[str, set[str]]:
    """By the full name of what is imported, and by the last name of what is assigned."""
    by_meaning: dict[str, set[str]] = defaultdict(set)

    for scope in program.files.index(source).scopes.values():
        for name, bindings in scope.names.items():
            for binding in bindings:
                if binding.imported:
                    by_meaning[names.canonical(binding.imported)].add(name)
                elif binding.kind == "assign" and isinstance(binding.value, _NAMES):
                    by_meaning[last_name(binding.value)].add(name)

    return by_meaning
