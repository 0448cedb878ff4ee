"""Where a value comes from: its expression, one step back or completely, and the code that makes
it."""

from __future__ import annotations

import ast
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query, is_counter
from drumline_lint.program.ranks import is_world_size
from drumline_lint.program.tree import (
    Binding,
    ScopeNode,
    ancestors,
    children,
    dotted,
    last_name,
    nodes_in,
    scope_of,
)
from drumline_lint.program.value import Class, Function, Instance, Rank
from drumline_lint.reading.source import Source

MOST_WRITTEN = 400
MOST_PARTS = 300
"""The most expressions for one query: more occur only in generated code."""
# Attributes of a path that are still a path; other attributes say nothing about their owner.
_PARTS_OF_PATHS = ("parent", "name", "stem", "parents", "suffix")


def written_values(program: Program, expression: ast.expr | None) -> list[ast.expr]:
    """All expressions that it may come from; a name or parameter of unknown origin is kept."""
    written: list[ast.expr] = []
    pending = [expression] if expression is not None else []
    visited = set[ast.expr]()
    while pending and len(visited) < MOST_WRITTEN:
        current = pending.pop()
        if current in visited:
            continue
        visited.add(current)
        earlier = previous_values(program, current)
        pending += [value for value in earlier if value is not None]
        if not earlier or None in earlier:
            written.append(current)
    return written


def previous_values(program: Program, expression: ast.expr) -> Sequence[ast.expr | None]:
    """The expressions that it gets its value from, one step back; includes None for an unknown
    one."""
    if isinstance(expression, ast.IfExp):
        return [expression.body, expression.orelse]
    if isinstance(expression, ast.BoolOp):
        return list(expression.values)
    if isinstance(expression, (ast.NamedExpr, ast.Await)):
        return [expression.value]
    if isinstance(expression, ast.Name):
        return [
            value
            for binding in program.bindings(expression)
            for value in _of_binding(program, binding)
        ]
    if isinstance(expression, ast.Attribute):
        return _of_attribute(program, expression)
    return []


def _of_binding(program: Program, binding: Binding) -> Sequence[ast.expr | None]:
    if binding.kind == "parameter" and isinstance(binding.node, ast.arg):
        return program.arguments_for(binding.node)
    if binding.value is None or binding.kind not in ("assign", "entered"):
        return [None]
    value = binding.value
    for number in binding.path:
        if not isinstance(value, (ast.Tuple, ast.List)) or number >= len(value.elts):
            break
        value = value.elts[number]
    return [value]


def _of_attribute(program: Program, node: ast.Attribute) -> list[ast.expr | None]:
    """What is assigned to it, if the owner is an instance or the same expression."""
    classes = [value.of for value in program.values(node.value) if isinstance(value, Instance)]
    homes = [
        place
        for class_ in classes
        for place in program.ancestry(class_)
        if not isinstance(place, str)
    ]
    files = dict.fromkeys([program.source_of(node), *map(program.source_of, homes)])
    as_written = dotted(node.value)
    values: list[ast.expr | None] = []
    for source in files:
        for target, binding in program.index(source).attributes.get(node.attr, ()):
            is_own = any(home in ancestors(target) for home in homes)
            if is_own or (not homes and as_written and dotted(target.value) == as_written):
                values += _of_binding(program, binding)
    return values


def parts(program: Program, expression: ast.expr | None) -> Iterator[ast.expr]:
    """An expression, its parts, and all their origins. The nearest come first, since there is a
    limit."""
    pending = deque([] if expression is None else [expression])
    visited: set[ast.expr] = set()
    while pending and len(visited) < MOST_PARTS:
        current = pending.popleft()
        if current in visited:
            continue
        visited.add(current)
        yield current
        pending.extendleft(reversed([*_inner(current)]))
        pending += origins(program, current)
        every = program.bindings(current) if isinstance(current, ast.Name) else []
        pending += [
            binding.value
            for binding in every
            if binding.kind == "each" and binding.value is not None and not _is_counted(binding)
        ]


def _is_counted(binding: Binding) -> bool:
    """A number from `range` or `enumerate` does not depend on the iterable."""
    called = binding.value.func if isinstance(binding.value, ast.Call) else None
    return is_counter(binding) or (called is not None and last_name(called) in ("range", "trange"))


def origins(program: Program, expression: ast.expr) -> list[ast.expr]:
    """The origins one step back, with later item assignments, and what a function returns."""
    values = [value for value in previous_values(program, expression) if value is not None]
    if isinstance(expression, ast.Name):
        values += _filled(program, expression)
    if isinstance(expression, ast.Call):
        function = program.function_of(expression)
        if (
            isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            and function.name != "__init__"
        ):
            values += [
                statement.value
                for statement in nodes_in(function, ast.Return)
                if statement.value is not None
            ]
    return values


def _inner(expression: ast.expr) -> Iterator[ast.expr]:
    if isinstance(expression, ast.Attribute):
        if expression.attr in _PARTS_OF_PATHS:
            yield expression.value
        return
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        yield expression.func.value
    for child in children(expression):
        if isinstance(child, ast.keyword):
            yield child.value
        elif isinstance(child, ast.expr) and child is not getattr(expression, "func", None):
            yield child


def _filled(program: Program, name: ast.Name) -> list[ast.expr]:
    """`state["model"] = ...` in the same function."""
    return _all_filled(program, program.source_of(name)).get((scope_of(name), name.id), [])


@cached_query
def _all_filled(program: Program, source: Source) -> dict[tuple[ScopeNode, str], list[ast.expr]]:
    by_name: dict[tuple[ScopeNode, str], list[ast.expr]] = defaultdict(list)
    for statement in program.index(source).every(ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                by_name[scope_of(statement), target.value.id].append(statement.value)
    return by_name


DEEPEST = 12
LARGEST = 4000
"""The most nodes for one query: more occur only in generated code."""


def components(
    program: Program, expression: ast.expr | None, *, only_making: bool = False
) -> Iterator[ast.AST]:
    """Everything that it is made of: the expression, its arguments, and the functions and classes
    that it calls.

    `only_making`: for a class, only its constructor, not its other methods.
    """
    pending: list[tuple[ast.AST, int]] = [
        (value, 0) for value in written_values(program, expression)
    ]
    visited: set[ast.AST] = set()
    while pending and len(visited) < LARGEST:
        node, depth = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        yield node
        if depth > DEEPEST:
            continue
        for child in children(node):
            if not (only_making and _is_for_later(node, child)):
                pending.append((child, depth))
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            pending += [
                (value, depth + 1) for value in previous_values(program, node) if value is not None
            ]
        if isinstance(node, ast.Call):
            pending += [(definition, depth + 1) for definition in called_definitions(program, node)]


def _is_for_later(owner: ast.AST, part: ast.AST) -> bool:
    is_method = isinstance(owner, ast.ClassDef) and isinstance(
        part, (ast.FunctionDef, ast.AsyncFunctionDef)
    )
    return is_method and getattr(part, "name", "") not in (
        "__init__",
        "__new__",
        "__post_init__",
        "setup",
    )


def called_definitions(program: Program, call: ast.Call) -> list[ast.AST]:
    """The functions and classes of the given files that a call runs."""
    values = program.values(call.func)
    return [value.node for value in values if isinstance(value, (Function, Class))]


def depends_on_rank(program: Program, expression: ast.expr | None) -> bool:
    """Whether it is made of a rank or the world size, directly or not."""
    return any(is_rank_or_count(program, node) for node in components(program, expression))


def is_rank_or_count(program: Program, node: ast.AST) -> bool:
    """`rank`, `dist.get_rank()`, `world_size`."""
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.BinOp)):
        return False
    return is_world_size(node) or any(isinstance(value, Rank) for value in program.values(node))
