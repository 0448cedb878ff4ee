"""Code that nobody comes to: under `if False and ...`, or under a switch that all callers leave off."""

from __future__ import annotations

import ast

from drumline_lint.program.arguments import argument, default_of, has_unknown_arguments, number_of
from drumline_lint.program.program import Program
from drumline_lint.program.tree import class_around, function_around, up
from drumline_lint.reading.source import Source
from drumline_lint.running.conditions import Conditions, conditions
from drumline_lint.running.deciding import decided, is_joined
from drumline_lint.running.known_callers import callers_in_ranks
from drumline_lint.running.set_by_name import may_be_set_by_name

DEEPEST = 6
MOST_GIVEN_ON = 20


def is_dead(program: Program, node: ast.AST, depth: int = 0) -> bool:
    """Whether a condition around it never holds in distributed runs, or all that call its function are dead."""
    if is_switched_off(program, list(conditions(program, node))):
        return True
    function = function_around(node)
    if function is None or depth > DEEPEST:
        return False
    calls = [call for call in program.callers(function) if function_around(call) is not function]
    return bool(calls) and all(is_dead(program, call, depth + 1) for call in calls)


def is_switched_off(program: Program, held: Conditions) -> bool:
    """Whether one of these never holds."""
    return any(always(program, test) is (not holds) for test, holds in held)


def always(program: Program, test: ast.expr) -> bool | None:
    """What a condition always is, in distributed runs; None where it may be either."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if is_joined(test):
        return decided(test, lambda one: always(program, one))
    if isinstance(test, ast.Name):
        return program.once("truth", test, lambda: _of_name(program, test), None, MOST_GIVEN_ON)
    if isinstance(test, ast.Attribute):
        return program.once("truth", test, lambda: _of_attribute(program, test), None, MOST_GIVEN_ON)
    return None


def _of_name(program: Program, name: ast.Name) -> bool | None:
    """Of a parameter; what else is a switch, its author means to set."""
    bindings = program.bindings(name)
    parameters = [one.node for one in bindings if isinstance(one.node, ast.arg)]
    is_one = len(bindings) == len(parameters) == 1
    return _of_parameter(program, parameters[0]) if is_one else None


def _of_attribute(program: Program, node: ast.Attribute) -> bool | None:
    """Of what `self` gets from a parameter when it is made, and from nobody else."""
    function = function_around(node)
    owner = None if function is None else class_around(function)
    if owner is None or not _is_self(node):
        return None
    given = _assigned(program, program.source_of(node), node.attr, owner)
    parameter = given[0] if len(given) == 1 else None
    found = _of_name(program, parameter) if isinstance(parameter, ast.Name) else None
    if found is None or may_be_set_by_name(program, owner, node.attr):
        return None
    others = (one for one in program.sources if one is not program.source_of(node) and node.attr in one.text)
    return None if any(_assigned(program, one, node.attr, owner) for one in others) else found


def _assigned(program: Program, source: Source, name: str, owner: ast.ClassDef) -> list[ast.expr | None]:
    """What a file gives an attribute of a class, or of something that may be one; None where it is not known."""
    return [
        _part(binding.value, binding.path) if binding.kind == "assign" else None
        for target, binding in program.index(source).attributes.get(name, ())
        if not _is_of_other_class(program, target, owner)
    ]


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_of_other_class(program: Program, target: ast.Attribute, owner: ast.ClassDef) -> bool:
    function = function_around(target)
    home = None if function is None else class_around(function)
    if home is None or not _is_self(target):
        return False
    return owner not in program.ancestry(home) and home not in program.ancestry(owner)


def _part(value: ast.expr | None, path: tuple[int, ...]) -> ast.expr | None:
    for number in path:
        value = value.elts[number] if isinstance(value, ast.Tuple) and number < len(value.elts) else None
    return value


def _of_parameter(program: Program, parameter: ast.arg) -> bool | None:
    """The same for all callers: most leave it at its default, and the others give the same."""
    function = up(up(parameter) or parameter)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    default = default_of(function, parameter)
    if not isinstance(default, ast.Constant) or not (
        default.value is None or isinstance(default.value, bool)
    ):
        return None
    said, number = set(), number_of(function, parameter)
    for call in callers_in_ranks(program, function):
        given = argument(call, number, parameter.arg) or default
        said.add(None if has_unknown_arguments(call) else always(program, given))
    return said.pop() if len(said) == 1 else None
