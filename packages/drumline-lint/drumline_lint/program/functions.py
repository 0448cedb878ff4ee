"""Functions of the given files: who calls them, and what they return."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.arguments import argument
from drumline_lint.program.classes import called_as, method
from drumline_lint.program.library_calls import calls_by_word
from drumline_lint.program.partials import calls_through
from drumline_lint.program.tree import FunctionNode, class_around, inside, last_name, position, source_of
from drumline_lint.program.unpacking import any_of
from drumline_lint.program.value import NOTHING, Class, Function, Instance, Values
from drumline_lint.program.whole import Whole
from drumline_lint.reading.source import Source

# They start a function in other processes or threads.
STARTING = ("spawn", "start_processes", "Process", "Thread")


def function_of(program: Whole, call: ast.Call) -> FunctionNode | None:
    """The function of the given files that a call runs, of several the first; of a class, its `__init__`."""
    own = [one for one in program.values(call.func) if isinstance(one, Function | Class | Instance)]
    for value in own if len(own) < 2 else sorted(own, key=_in_text):
        if isinstance(value, Function):
            return value.node
        if isinstance(value, Class):
            return method(program, value.node, "__init__")
        return method(program, value.of, called_as(program, value.of))
    return None


def _in_text(value: Function | Class | Instance) -> tuple[str, tuple[int, int], str]:
    """Sets have no order, and what is told must not depend on the run."""
    node = value.of if isinstance(value, Instance) else value.node
    return str(source_of(node).path), position(node), value.__class__.__name__


def returned(program: Whole, function: FunctionNode) -> Values:
    """All that a function may return."""
    if isinstance(function, ast.Lambda):
        return program.values(function.body)
    given = [one.value for one in inside(function, ast.Return)]
    return program.meanings.once(("returned", function), lambda: any_of(program, given), NOTHING)


def callers(program: Whole, function: FunctionNode) -> list[ast.Call]:
    """All calls of it in the given files that could be resolved; `mp.spawn(function)` is one."""
    nobody: list[ast.Call] = []
    return program.meanings.once(("callers", function), lambda: _find_callers(program, function), nobody)


def _find_callers(program: Whole, function: FunctionNode) -> list[ast.Call]:
    owner = class_around(function)
    if isinstance(function, ast.Lambda) or (owner is not None and function.name in ("forward", "__call__")):
        return []  # who calls an instance is not found by a name
    by = owner.name if owner is not None and function.name == "__init__" else function.name
    found = []
    for source in program.files.calling.get(by, ()):
        calls = program.files.index(source).calls.get(by, ())
        found += [call for call in calls if function_of(program, call) is function]
    through = calls_through(program, function, by)
    found += [call for call in through if call not in found and function_of(program, call) is function]
    starting = program.remember("calls that start", lambda: calls_by_word(_all_starting(program)))
    return found + [call for call in starting.get(by, ()) if function in started(program, call)]


def _all_starting(program: Whole) -> Iterator[tuple[Source, list[ast.Call]]]:
    for name in STARTING:
        for source in program.files.calling.get(name, ()):
            calls = program.files.index(source).calls.get(name, ())
            yield source, [call for call in calls if target_of(call) is not None]


def started(program: Whole, call: ast.Call) -> list[FunctionNode]:
    """What a call starts in another process or thread: `mp.spawn(main)`, `Process(target=main)`."""
    target = target_of(call)
    if target is None:  # as of nearly all
        return []
    functions = [value.node for value in program.values(target) if isinstance(value, Function)]
    return list(dict.fromkeys(functions))


def target_of(call: ast.Call) -> ast.expr | None:
    """What a call is given to start, if it starts something."""
    if last_name(call.func) not in STARTING:
        return None
    return argument(call, 0, "fn") or argument(call, None, "target")
