"""Where an expression comes from: what is written behind a name, parameter or attribute, and what that is made of."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from drumline.lint.program.program import Program
from drumline.lint.program.tree import Binding, above, dotted, up
from drumline.lint.program.value import Class, Function, Instance, Rank

DEEPEST = 12
MOST = 400
LARGEST = 4000
"""So many nodes are looked at for one answer; generated code is not worth more."""


def written(program: Program, expression: ast.expr | None) -> list[ast.expr]:
    """All that it may be, as it is written where it comes from; a name or parameter whose origin is not seen stays."""
    found: list[ast.expr] = []
    pending, seen = [expression] if expression is not None else [], set[ast.expr]()
    while pending and len(seen) < MOST:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        behind = _behind(program, current)
        pending += [one for one in behind if one is not None]
        if not behind or None in behind:
            found.append(current)
    return found


def _behind(program: Program, expression: ast.expr) -> Sequence[ast.expr | None]:
    """What it gets its value from; None among them: from something that is not seen, too."""
    if isinstance(expression, ast.IfExp):
        return [expression.body, expression.orelse]
    if isinstance(expression, ast.BoolOp):
        return list(expression.values)
    if isinstance(expression, ast.NamedExpr | ast.Await):
        return [expression.value]
    if isinstance(expression, ast.Name):
        return [one for binding in program.bindings(expression) for one in _of_binding(program, binding)]
    if isinstance(expression, ast.Attribute):
        return _of_attribute(program, expression)
    return []


def _of_binding(program: Program, binding: Binding) -> Sequence[ast.expr | None]:
    if binding.kind == "parameter" and isinstance(binding.node, ast.arg):
        return program.given_for(binding.node)
    if binding.value is None or binding.kind not in ("assign", "entered"):
        return [None]
    value = binding.value
    for number in binding.path:
        if not isinstance(value, ast.Tuple | ast.List) or number >= len(value.elts):
            break
        value = value.elts[number]
    return [value]


def _of_attribute(program: Program, node: ast.Attribute) -> list[ast.expr | None]:
    """What is assigned to it, where the owner is an instance or is written the same way."""
    classes = {value.of for value in program.values(node.value) if isinstance(value, Instance)}
    homes = {place for one in classes for place in program.ancestry(one) if not isinstance(place, str)}
    files = {program.source_of(home) for home in homes} | {program.source_of(node)}
    as_written = dotted(node.value)
    found: list[ast.expr | None] = []
    for source in files:
        for target, binding in program.index(source).attributes.get(node.attr, ()):
            is_own = any(home in above(target) for home in homes)
            if is_own or (not homes and as_written and dotted(target.value) == as_written):
                found += _of_binding(program, binding)
    return found


def made_of(program: Program, expression: ast.expr | None, *, only_making: bool = False) -> Iterator[ast.AST]:
    """All that it is made of: what is written, its arguments, and the bodies of the functions and classes it calls.

    `only_making`: of a class, what is done when it is made, and not what its other methods do later.
    """
    pending: list[tuple[ast.AST, int]] = [(one, 0) for one in written(program, expression)]
    seen: set[ast.AST] = set()
    while pending and len(seen) < LARGEST:
        node, depth = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if depth > DEEPEST:
            continue
        for child in ast.iter_child_nodes(node):
            if up(child) is node and not (only_making and _is_for_later(node, child)):
                pending.append((child, depth))
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            pending += [(one, depth + 1) for one in _behind(program, node) if one is not None]
        if isinstance(node, ast.Call):
            pending += [(one, depth + 1) for one in bodies(program, node)]


def _is_for_later(owner: ast.AST, part: ast.AST) -> bool:
    is_method = isinstance(owner, ast.ClassDef) and isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_method and getattr(part, "name", "") not in ("__init__", "__new__", "__post_init__", "setup")


def bodies(program: Program, call: ast.Call) -> list[ast.AST]:
    """The functions and classes of the given files that a call goes into."""
    values = program.values(call.func)
    return [value.node for value in values if isinstance(value, Function | Class)]


def depends_on_rank(program: Program, expression: ast.expr | None) -> bool:
    """Whether a rank, or how many there are, is anywhere in what it is made of."""
    return any(is_rank_or_count(program, node) for node in made_of(program, expression))


def is_rank_or_count(program: Program, node: ast.AST) -> bool:
    """`rank`, `dist.get_rank()`, `world_size`."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.BinOp):
        return False
    return is_world_size(node) or any(isinstance(value, Rank) for value in program.values(node))


def is_world_size(node: ast.AST) -> bool:
    """By its name: nothing else is known of how many processes there are."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value == "WORLD_SIZE"
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return any(part in name.lower() for part in ("world_size", "worldsize", "num_replicas", "num_ranks"))
