"""Code that is never reached: under `if False and ...`, or under a switch that all callers leave
off."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.flow.conditions import Conditions, conditions, decided, is_joined
from drumline_lint.flow.distributed import distributed_sources
from drumline_lint.flow.single_process import holds_on_every_way, is_single_process
from drumline_lint.program.calls import argument, default_of, has_unknown_arguments, number_of
from drumline_lint.program.program import Program
from drumline_lint.program.queries import recursive_query
from drumline_lint.program.tree import enclosing_class, enclosing_function, last_name, parent_of
from drumline_lint.program.value import Class, Function
from drumline_lint.reading.source import Source

Definition = ast.FunctionDef | ast.AsyncFunctionDef
# A function with any other decorator may be called with anything: commands, jobs, tests.
_PLAIN_DECORATORS = {
    "classmethod",
    "staticmethod",
    "no_grad",
    "inference_mode",
    "smart_inference_mode",
}


@recursive_query([])
def callers_in_ranks(program: Program, function: Definition) -> list[ast.Call]:
    """All certain and possible callers; empty if the function is passed on to unknown code."""
    names = [
        last_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
        for decorator in function.decorator_list
    ]
    if not set(names) <= _PLAIN_DECORATORS:
        return []
    callers: list[ast.Call] = []
    for mention in _mentions(program, function):
        calls = _calls_by(program, mention)
        if not calls:
            return []
        callers += calls
    return [call for call in callers if not is_single_process(program, call)]


def _mentions(program: Program, function: Definition) -> Iterator[ast.expr]:
    owner = enclosing_class(function)
    is_made = owner is not None and function.name == "__init__"
    meant = Class(owner) if owner is not None and is_made else Function(function)
    name = owner.name if owner is not None and is_made else function.name
    distributed = distributed_sources(program)
    for source in program.sources:
        if source in distributed and name in source.text:
            index = program.index(source)
            names = {name, *_imported_as(program, source, name)}
            for node in (*index.every(ast.Name), *index.every(ast.Attribute)):
                if (
                    last_name(node) in names
                    and isinstance(node.ctx, ast.Load)
                    and _is(program, node, meant)
                ):
                    yield node


def _imported_as(program: Program, source: Source, name: str) -> Iterator[str]:
    """The file's own name for it: `from lib import NAME as other`."""
    for statement in program.index(source).every(ast.ImportFrom):
        yield from (
            alias.asname for alias in statement.names if alias.name == name and alias.asname
        )


def _is(program: Program, node: ast.expr, meant: Class | Function) -> bool:
    values = program.values(node)
    return not values or any(
        isinstance(value, (Class, Function)) and value.node is meant.node for value in values
    )


def _calls_by(program: Program, mention: ast.expr) -> list[ast.Call]:
    """The call itself, or calls of a name that it is assigned to: `sample = a.loop if slow else
    a.quick`."""
    outer = parent_of(mention)
    if isinstance(outer, ast.Call) and outer.func is mention:
        return [outer]
    while isinstance(outer, ast.IfExp):
        outer = parent_of(outer)
    target = outer.targets[0] if isinstance(outer, ast.Assign) and len(outer.targets) == 1 else None
    if not isinstance(target, ast.Name):
        return []
    index = program.index(program.source_of(mention))
    calls = [call for call in index.calls.get(target.id, ()) if isinstance(call.func, ast.Name)]
    named = {call.func for call in calls}
    mentions = [
        name for name in index.every(ast.Name) if name.id == target.id and name not in named
    ]
    return calls if all(isinstance(mention.ctx, ast.Store) for mention in mentions) else []


MOST_GIVEN_ON = 20


def is_dead(program: Program, node: ast.AST) -> bool:
    """Whether a condition around it, or around all calls of its function, never holds in
    distributed runs."""
    return holds_on_every_way(
        program, node, lambda place: is_switched_off(program, list(conditions(program, place)))
    )


def is_switched_off(program: Program, held: Conditions) -> bool:
    return any(always(program, test) is (not holds) for test, holds in held)


def always(program: Program, test: ast.expr) -> bool | None:
    """The constant value of a condition in distributed runs; None if it may be either."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if is_joined(test):
        return decided(test, lambda part: always(program, part))
    if isinstance(test, ast.Name):
        return _of_name(program, test)
    if isinstance(test, ast.Attribute):
        constant = _OF_LIBRARIES.get(program.name_of(test))
        return _of_attribute(program, test) if constant is None else constant
    return _of_version(program, test) if isinstance(test, ast.Compare) else None


_OF_LIBRARIES = {"six.PY3": True, "six.PY2": False, "typing.TYPE_CHECKING": False}


def _of_version(program: Program, test: ast.Compare) -> bool | None:
    """`sys.version_info[0] == 2`: torch needs Python 3."""
    left = test.left.value if isinstance(test.left, ast.Subscript) else test.left
    if program.name_of(left) not in ("sys.version_info", "sys.version_info.major"):
        return None
    number = test.comparators[0]
    major = number.value if isinstance(number, ast.Constant) else None
    if major == 2:
        return not isinstance(test.ops[0], (ast.Eq, ast.Lt, ast.LtE))
    return not isinstance(test.ops[0], (ast.NotEq, ast.Lt)) if major == 3 else None


@recursive_query(None, MOST_GIVEN_ON)
def _of_name(program: Program, name: ast.Name) -> bool | None:
    """For a parameter; other switches are meant to be set by the user."""
    bindings = program.bindings(name)
    parameters = [binding.node for binding in bindings if isinstance(binding.node, ast.arg)]
    is_one = len(bindings) == len(parameters) == 1
    return _of_parameter(program, parameters[0]) if is_one else None


@recursive_query(None, MOST_GIVEN_ON)
def _of_attribute(program: Program, node: ast.Attribute) -> bool | None:
    """For an attribute of `self` that is set only from a parameter of `__init__`."""
    function = enclosing_function(node)
    owner = None if function is None else enclosing_class(function)
    if owner is None or not _is_self(node):
        return None
    values = _assigned(program, program.source_of(node), node.attr, owner)
    parameter = values[0] if len(values) == 1 else None
    value = _of_name(program, parameter) if isinstance(parameter, ast.Name) else None
    if value is None or any(
        word in program.source_of(node).text for word in ("setattr(", "__dict__", "vars(")
    ):
        return None  # it may be set by its name
    other_sources = (
        source
        for source in program.sources
        if source is not program.source_of(node) and node.attr in source.text
    )
    return (
        None
        if any(_assigned(program, source, node.attr, owner) for source in other_sources)
        else value
    )


def _assigned(
    program: Program, source: Source, name: str, owner: ast.ClassDef
) -> list[ast.expr | None]:
    """What a file assigns to an attribute of a class, or of a possible instance; None if
    unknown."""
    return [
        _part(binding.value, binding.path) if binding.kind == "assign" else None
        for target, binding in program.index(source).attributes.get(name, ())
        if not _is_of_other_class(program, target, owner)
    ]


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_of_other_class(program: Program, target: ast.Attribute, owner: ast.ClassDef) -> bool:
    function = enclosing_function(target)
    home = None if function is None else enclosing_class(function)
    if home is None or not _is_self(target):
        return False
    return owner not in program.ancestry(home) and home not in program.ancestry(owner)


def _part(value: ast.expr | None, path: tuple[int, ...]) -> ast.expr | None:
    for number in path:
        value = (
            value.elts[number]
            if isinstance(value, ast.Tuple) and number < len(value.elts)
            else None
        )
    return value


def _of_parameter(program: Program, parameter: ast.arg) -> bool | None:
    """The value that is the same for all callers: most use the default, and the others give the
    same."""
    function = parent_of(parent_of(parameter) or parameter)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    default = default_of(function, parameter)
    if not isinstance(default, ast.Constant) or not (
        default.value is None or isinstance(default.value, bool)
    ):
        return None
    values = set()
    number = number_of(function, parameter)
    for call in callers_in_ranks(program, function):
        value = argument(call, number, parameter.arg) or default
        values.add(None if has_unknown_arguments(call) else always(program, value))
    return values.pop() if len(values) == 1 else None
