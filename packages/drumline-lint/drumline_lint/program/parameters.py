"""What the parameters of functions may be: what callers give for them, their defaults, and what their names say."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from drumline_lint.program import ranks
from drumline_lint.program.arguments import (
    argument,
    default_of,
    has_unknown_arguments,
    is_instance,
    number_of,
)
from drumline_lint.program.functions import callers, started, target_of
from drumline_lint.program.partials import as_called, bound_to
from drumline_lint.program.tree import Binding, class_around, last_name, up
from drumline_lint.program.unpacking import any_of, unpacked
from drumline_lint.program.value import NOTHING, Instance, Known, Rank, Values
from drumline_lint.program.whole import Whole

# They give the function the number of its process first.
_NUMBERING = ("spawn", "start_processes")


def of_parameter(program: Whole, parameter: ast.arg) -> Values:
    """All that it may be."""
    function = function_with(parameter)
    if function is None:
        return NOTHING
    owner = class_around(function)
    if owner is not None and is_instance(function, parameter):
        return frozenset({Instance(owner)})
    return program.meanings.once(parameter, lambda: _passed(program, function, parameter), NOTHING)


def function_with(parameter: ast.arg) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function that it is a parameter of; not a lambda."""
    function = up(up(parameter) or parameter)
    return function if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _passed(program: Whole, function: ast.FunctionDef | ast.AsyncFunctionDef, parameter: ast.arg) -> Values:
    calls = callers(program, function)
    number = number_of(function, parameter)
    found: Values = frozenset().union(
        *(_given(program, call, number, parameter.arg, function) for call in calls)
    )
    if found - {Known(None)}:
        if _is_left_out(program, calls, number, parameter.arg, function):
            return found | program.values(default_of(function, parameter))
        return found
    default = program.values(default_of(function, parameter))
    named = NOTHING if ranks.is_other_number(default) else ranks.by_name(parameter.arg)
    return named or found | default


def _is_left_out(
    program: Whole,
    calls: Sequence[ast.Call],
    number: int | None,
    name: str,
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> bool:
    """Whether one of the callers leaves it at its default."""
    return any(
        argument(whole, number, name) is None and not has_unknown_arguments(whole)
        for call in calls
        if function not in started(program, call)
        for whole in as_called(program, call, function)
    )


def _given(
    program: Whole,
    call: ast.Call,
    number: int | None,
    name: str,
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Values:
    """What one caller gives for it."""
    if function not in started(program, call):
        every = as_called(program, call, function)
        return any_of(program, [argument(one, number, name) for one in every])
    before = bound_to(program, target_of(call), function)
    return frozenset().union(*(_given_to_started(program, call, number, name, one) for one in before))


def _given_to_started(
    program: Whole, call: ast.Call, number: int | None, name: str, before: ast.Call
) -> Values:
    """What a function in a new process gets: what it has from before, the number of the process, and `args`."""
    bound = argument(before, number, name)
    if bound is not None or number is None or has_unknown_arguments(before):
        return program.values(bound)
    place = number - len(before.args)
    if last_name(call.func) in _NUMBERING:
        if place == 0:
            return frozenset({Rank("spawned")})
        place -= 1
    return unpacked(program, program.values(argument(call, 1, "args")), (place,))


def given_for(program: Whole, parameter: ast.arg) -> list[ast.expr | None]:
    """The expressions that callers give for a parameter; None for each that is not known."""
    function = function_with(parameter)
    if function is None:
        return [None]
    number, default = number_of(function, parameter), default_of(function, parameter)
    found: list[ast.expr | None] = []
    for call in callers(program, function):
        if function in started(program, call):
            before = bound_to(program, target_of(call), function)
            found += [argument(one, number, parameter.arg) for one in before]
        else:
            for whole in as_called(program, call, function):
                left_out = None if has_unknown_arguments(whole) else default
                found.append(argument(whole, number, parameter.arg) or left_out)
    return found or [None]


def given_by(program: Whole, binding: Binding) -> list[ast.expr | None]:
    """The expressions that a binding gives a name: of a parameter those of all callers; None if not known."""
    if isinstance(binding.node, ast.arg):
        return given_for(program, binding.node)
    return [binding.value if binding.kind == "assign" and not binding.path else None]
