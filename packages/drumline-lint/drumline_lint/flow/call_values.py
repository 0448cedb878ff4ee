"""The value of a condition in a function for one call of it, by arguments, defaults, and the
calling ranks."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from drumline_lint.flow.conditions import decided, is_joined
from drumline_lint.program.calls import argument, default_of, has_unknown_arguments, number_of
from drumline_lint.program.program import Program
from drumline_lint.program.tree import FunctionNode, nodes_in
from drumline_lint.program.value import (
    CallResult,
    ConstantValue,
    Function,
    Instance,
    Items,
    Rank,
    RankTest,
    Value,
)

DEEPEST = 12
Possible: TypeAlias = frozenset[Any]
UNKNOWN: Possible = frozenset()
FIRST: Possible = frozenset({0})
# the smallest and the largest; others are added when needed
OTHERS: Possible = frozenset({1, 1_000_000_000})
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True, eq=False)
class CallFrame:
    """A function that one call runs; None if no function has been entered yet."""

    function: FunctionNode | None
    call: ast.Call
    outer: CallFrame | None
    """Where the call is."""
    tests: tuple[RankTest, ...]
    """The conditions on the ranks that make the first call."""

    @property
    def depth(self) -> int:
        return 0 if self.outer is None else self.outer.depth + 1

    def is_within(self, function: FunctionNode) -> bool:
        return self.function is function or (
            self.outer is not None and self.outer.is_within(function)
        )


Place: TypeAlias = CallFrame | None


def truth(program: Program, test: ast.expr, place: Place, depth: int = 0) -> bool | None:
    """Whether a condition holds; None if unknown."""
    test, place = _resolved(program, test, place)
    if is_joined(test):
        # `a = not b` and `b = not a` refer to each other.
        return (
            None
            if depth > DEEPEST
            else decided(test, lambda part: truth(program, part, place, depth + 1))
        )
    if isinstance(test, ast.Compare):
        return _compared(program, test, place) if len(test.ops) == 1 else None
    return _agreed({bool(value) for value in _possible(program, test, place)})


def _agreed(answers: set[bool]) -> bool | None:
    return answers.pop() if len(answers) == 1 else None


def _compared(program: Program, test: ast.Compare, place: Place) -> bool | None:
    kind = type(test.ops[0])
    right = test.comparators[0]
    left = _possible(program, test.left, place)
    if kind in (ast.In, ast.NotIn):
        listed, place = _resolved(program, right, place)
        elements = listed.elts if isinstance(listed, (ast.Tuple, ast.List, ast.Set)) else [None]
        every = [_possible(program, element, place) for element in elements]
        if not left or any(len(values) != 1 for values in every):
            return None
        among = frozenset().union(*every)
        return _agreed({(value in among) == (kind is ast.In) for value in _with_asked(left, among)})
    right_values = _possible(program, right, place)
    if right_values == {None} and not left and _is_something(program, test.left, place):
        return kind in (ast.IsNot, ast.NotEq)
    try:
        return _agreed(
            {
                _COMPARED[kind](left_value, right_value)
                for left_value in _with_asked(left, right_values)
                for right_value in _with_asked(right_values, left)
            }
        )
    except TypeError:
        return None


def _with_asked(ranks: Possible, numbers: Possible) -> Possible:
    """Adds the number that ranks are compared with: `rank == 3` holds for one of the others."""
    if ranks != OTHERS:
        return ranks
    return ranks | {number for number in numbers if isinstance(number, int) and number > 0}


def _is_something(program: Program, expression: ast.expr, place: Place) -> bool:
    expression, place = _resolved(program, expression, place)
    if _parameter(program, expression, place) is not None:
        return False
    values = program.values(expression)
    return bool(values) and all(_is_object(value) for value in values)


def _is_object(value: Value) -> bool:
    """The result of a library's function may be None, except torch's."""
    if isinstance(value, CallResult):
        return value.name.startswith("torch.") or value.name.rpartition(".")[2][:1].isupper()
    return isinstance(value, (Instance, Function, Items)) or (
        isinstance(value, ConstantValue) and value.value is not None
    )


def _possible(program: Program, expression: ast.expr | None, place: Place) -> Possible:
    if expression is None:
        return UNKNOWN
    expression, place = _resolved(program, expression, place)
    if _parameter(program, expression, place) is not None:
        return UNKNOWN
    values = program.values(expression)
    kinds = {value.kind for value in values if isinstance(value, Rank)}
    if kinds:
        return _ranks(kinds, place)
    if isinstance(expression, ast.Attribute):
        return UNKNOWN  # a class attribute is only a default
    constants = {value.value for value in values if isinstance(value, ConstantValue)}
    return frozenset(constants) if len(constants) == len(values) else UNKNOWN


def _ranks(kinds: set[str], place: Place) -> Possible:
    """Which ranks come here, by the conditions on those that made the first call."""
    for test in (
        place.tests if place is not None and kinds <= {"global", "local", "node", "spawned"} else ()
    ):
        is_of_all = test.kind in ("global", "spawned")
        if test.is_main and (is_of_all or kinds == {test.kind}):
            return FIRST
        if test.is_main is False and kinds == {test.kind}:
            return OTHERS
    return UNKNOWN


def _resolved(program: Program, expression: ast.expr, place: Place) -> tuple[ast.expr, Place]:
    """Follow names that were assigned once, and parameters to the arguments of the call."""
    for _ in range(DEEPEST):
        if (parameter := _parameter(program, expression, place)) is not None:
            origin = _given(program, *parameter) if _is_bound_once(program, expression) else None
            if origin is None:
                break
            expression, place = origin
        elif (assigned := _assigned_once(program, expression)) is not None:
            expression = assigned
        else:
            break
    return expression, place


def _parameter(
    program: Program, expression: ast.expr, place: Place
) -> tuple[ast.arg, CallFrame] | None:
    """The parameter of the entered function that a name refers to."""
    if place is None or place.function is None or not isinstance(expression, ast.Name):
        return None
    arguments = place.function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters += [
        parameter for parameter in (arguments.vararg, arguments.kwarg) if parameter is not None
    ]
    nodes = [binding.node for binding in program.bindings(expression)]
    return next(((parameter, place) for parameter in parameters if parameter in nodes), None)


def _given(program: Program, parameter: ast.arg, place: CallFrame) -> tuple[ast.expr, Place] | None:
    """The argument of the call for it, and where that is written; None if unknown."""
    function = place.function
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    value = argument(place.call, number_of(function, parameter), parameter.arg)
    if value is not None:
        return value, place.outer
    default = None if has_unknown_arguments(place.call) else default_of(function, parameter)
    return None if default is None else (default, None)


def _is_bound_once(program: Program, expression: ast.expr) -> bool:
    return isinstance(expression, ast.Name) and len(program.bindings(expression)) == 1


def _assigned_once(program: Program, expression: ast.expr) -> ast.expr | None:
    bindings = program.bindings(expression) if isinstance(expression, ast.Name) else []
    is_plain = len(bindings) == 1 and bindings[0].kind == "assign" and not bindings[0].path
    value = bindings[0].value if is_plain and isinstance(bindings[0].node, ast.Assign) else None
    # `flag = not flag`: what it was before
    is_own = value is not None and expression in nodes_in(value, ast.Name)
    return None if is_own else value


def is_on_parameter(program: Program, test: ast.expr, place: CallFrame) -> bool:
    """Whether it depends on a parameter, directly or indirectly; `args.save` is the same for all
    calls."""
    return any(_parameter(program, name, place) for name in _names(program, test, 0))


def _names(program: Program, expression: ast.expr, depth: int) -> Iterator[ast.Name]:
    owners = {attribute.value for attribute in nodes_in(expression, ast.Attribute)}
    for name in nodes_in(expression, ast.Name):
        if name not in owners:
            yield name
            assigned = _assigned_once(program, name) if depth < DEEPEST else None
            if assigned is not None:
                yield from _names(program, assigned, depth + 1)
