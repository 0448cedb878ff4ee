"""All calls of a function in distributed runs, where it is certain that there are no others in the given files."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.program import Program
from drumline_lint.program.tree import class_around, last_name, up
from drumline_lint.program.value import Class, Function
from drumline_lint.reading.source import Source
from drumline_lint.running.alone import is_alone
from drumline_lint.running.distributed import distributed_sources

Definition = ast.FunctionDef | ast.AsyncFunctionDef
# Who decorates otherwise may call it with anything: commands, jobs, tests.
_PLAIN_DECORATORS = {"classmethod", "staticmethod", "no_grad", "inference_mode", "smart_inference_mode"}


def callers_in_ranks(program: Program, function: Definition) -> list[ast.Call]:
    """Those of its own and those that may be; nothing if it is handed on to where it is not seen who calls it."""
    nobody: list[ast.Call] = []
    return program.once("callers in ranks", function, lambda: _find(program, function), nobody)


def _find(program: Program, function: Definition) -> list[ast.Call]:
    names = [last_name(one.func if isinstance(one, ast.Call) else one) for one in function.decorator_list]
    if not set(names) <= _PLAIN_DECORATORS:
        return []
    found: list[ast.Call] = []
    for mention in _mentions(program, function):
        calls = _calls_by(program, mention)
        if not calls:
            return []
        found += calls
    return [call for call in found if not is_alone(program, call)]


def _mentions(program: Program, function: Definition) -> Iterator[ast.expr]:
    """Wherever it is named, or may be."""
    owner = class_around(function)
    is_made = owner is not None and function.name == "__init__"
    meant = Class(owner) if owner is not None and is_made else Function(function)
    name = owner.name if owner is not None and is_made else function.name
    distributed = distributed_sources(program)
    for source in program.sources:
        if source in distributed and name in source.text:
            index, names = program.index(source), {name, *_imported_as(program, source, name)}
            for node in (*index.every(ast.Name), *index.every(ast.Attribute)):
                if last_name(node) in names and isinstance(node.ctx, ast.Load) and _is(program, node, meant):
                    yield node


def _imported_as(program: Program, source: Source, name: str) -> Iterator[str]:
    """What a file calls it instead: `from lib import NAME as other`."""
    for statement in program.index(source).every(ast.ImportFrom):
        yield from (one.asname for one in statement.names if one.name == name and one.asname)


def _is(program: Program, node: ast.expr, meant: Class | Function) -> bool:
    values = program.values(node)
    return not values or any(isinstance(one, Class | Function) and one.node is meant.node for one in values)


def _calls_by(program: Program, mention: ast.expr) -> list[ast.Call]:
    """The call itself, or those of a name that it is assigned to: `sample = a.loop if slow else a.quick`."""
    outer = up(mention)
    if isinstance(outer, ast.Call) and outer.func is mention:
        return [outer]
    while isinstance(outer, ast.IfExp):
        outer = up(outer)
    target = outer.targets[0] if isinstance(outer, ast.Assign) and len(outer.targets) == 1 else None
    if not isinstance(target, ast.Name):
        return []
    index = program.index(program.source_of(mention))
    calls = [call for call in index.calls.get(target.id, ()) if isinstance(call.func, ast.Name)]
    named = {call.func for call in calls}
    others = [one for one in index.every(ast.Name) if one.id == target.id and one not in named]
    return calls if all(isinstance(one.ctx, ast.Store) for one in others) else []
