"""Where a value comes from, as written: back through names, attributes, arguments and what functions return."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator

from drumline.lint.program.program import Program
from drumline.lint.program.tree import (
    class_around,
    dotted,
    function_around,
    inside,
    scope_node,
)

MOST = 300
# Of a path: what is left of it is still that path. Of other things an attribute says nothing of their owner.
_PARTS_OF_PATHS = ("parent", "name", "stem", "parents", "suffix")


def parts(program: Program, expression: ast.expr | None) -> Iterator[ast.expr]:
    """An expression, all that is in it, and all that those came from. What is near comes first: there is a limit."""
    pending = deque([] if expression is None else [expression])
    seen: set[ast.expr] = set()
    while pending and len(seen) < MOST:
        current = pending.popleft()
        if current in seen:
            continue
        seen.add(current)
        yield current
        pending.extendleft(reversed([*_inner(current)]))
        pending += origins(program, current)


def origins(program: Program, expression: ast.expr) -> list[ast.expr]:
    """What an expression may have got its value from: one step back."""
    if isinstance(expression, ast.Name):
        return [*_assigned(program, expression), *_filled(program, expression)]
    if isinstance(expression, ast.Attribute):
        return _set(program, expression)
    if isinstance(expression, ast.Call):
        function = program.function_of(expression)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name != "__init__":
            return [one.value for one in inside(function, ast.Return) if one.value is not None]
    return []


def _inner(expression: ast.expr) -> Iterator[ast.expr]:
    if isinstance(expression, ast.Attribute):
        if expression.attr in _PARTS_OF_PATHS:
            yield expression.value
        return
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        yield expression.func.value
    for child in ast.iter_child_nodes(expression):
        if isinstance(child, ast.keyword):
            yield child.value
        elif isinstance(child, ast.expr) and child is not getattr(expression, "func", None):
            yield child


def _assigned(program: Program, name: ast.Name) -> Iterator[ast.expr]:
    bindings = program.bindings(name)
    for binding in bindings:
        if binding.kind == "parameter":
            assert isinstance(binding.node, ast.arg)
            yield from passed(program, binding.node)
        elif binding.value is not None and binding.kind in ("assign", "entered"):
            yield _picked(binding.value, binding.path)


def _picked(value: ast.expr, path: tuple[int, ...]) -> ast.expr:
    """Of `a, b = x, y` the part that is meant."""
    for number in path:
        if not isinstance(value, ast.Tuple | ast.List) or number >= len(value.elts):
            break
        value = value.elts[number]
    return value


def _filled(program: Program, name: ast.Name) -> Iterator[ast.expr]:
    """`state["model"] = ...` in the same function."""
    around = scope_node(name)
    for statement in program.index(program.source_of(name)).every(ast.Assign):
        for target in statement.targets:
            if (
                isinstance(target, ast.Subscript)
                and isinstance(target.value, ast.Name)
                and target.value.id == name.id
                and scope_node(statement) is around
            ):
                yield statement.value


def passed(program: Program, parameter: ast.arg) -> Iterator[ast.expr]:
    """What is given for a parameter where the function is called."""
    yield from (given for given in program.given_for(parameter) if given is not None)


def _set(program: Program, attribute: ast.Attribute) -> list[ast.expr]:
    """`self.path = ...` in the same class, `args.path = ...` in the same file."""
    written = dotted(attribute.value)
    return [
        _picked(binding.value, binding.path)
        for target, binding in program.index(program.source_of(attribute)).attributes.get(attribute.attr, ())
        if binding.value is not None
        and binding.kind == "assign"
        and dotted(target.value) == written
        and _class_of(target) is _class_of(attribute)
    ]


def _class_of(node: ast.AST) -> ast.ClassDef | None:
    function = function_around(node)
    return None if function is None else class_around(function)
