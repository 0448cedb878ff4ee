"""What an expression may be, by the kind of node that it is."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from drumline_lint.program import ranks
from drumline_lint.program.bindings import of_name
from drumline_lint.program.called import of_call
from drumline_lint.program.members import of_attribute
from drumline_lint.program.unpacking import any_of
from drumline_lint.program.value import (
    NOTHING,
    Element,
    Function,
    Known,
    Library,
    Several,
    Value,
    Values,
)
from drumline_lint.program.whole import Whole


def evaluate(program: Whole, expression: ast.expr) -> Values:
    """All that it may be."""
    by_kind = _BY_KIND.get(expression.__class__)
    return NOTHING if by_kind is None else by_kind(program, expression)


def _of_constant(program: Whole, node: ast.Constant) -> Values:
    return frozenset({Known(node.value)})


def _of_lambda(program: Whole, node: ast.Lambda) -> Values:
    return frozenset({Function(node)})


def _of_several(program: Whole, node: ast.Tuple | ast.List | ast.Set) -> Values:
    return frozenset({Several(tuple(node.elts))})


def _of_inner(program: Whole, node: ast.NamedExpr | ast.Await) -> Values:
    return program.values(node.value)


def _of_either(program: Whole, node: ast.IfExp) -> Values:
    return program.values(node.body) | program.values(node.orelse)


def _of_and_or(program: Whole, node: ast.BoolOp) -> Values:
    about = [ranks.is_about_being_distributed(one) for one in node.values]
    return ranks.joined(node.op, [program.values(one) for one in node.values], about)


def _of_unary(program: Whole, node: ast.UnaryOp) -> Values:
    inner = program.values(node.operand)
    if isinstance(node.op, ast.Not):
        return ranks.flipped(inner)
    if isinstance(node.op, ast.USub):
        return frozenset(Known(-v.value) for v in inner if isinstance(v, Known) and isinstance(v.value, int))
    return NOTHING


def _of_binary(program: Whole, node: ast.BinOp) -> Values:
    # A sum of a thousand terms is a thousand deep; ranks are found in short ones.
    return ranks.computed(node.op, program.values(node.left), program.values(node.right))


def _of_comparison(program: Whole, node: ast.Compare) -> Values:
    if len(node.ops) != 1:
        return NOTHING
    right = node.comparators[0]
    if ranks.is_world_size(right) or ranks.is_world_size(node.left):
        return NOTHING
    others = program.values(right)
    for value in list(others):
        if isinstance(value, Several):
            others = any_of(program, value.items)
    return ranks.compared(node.ops[0], program.values(node.left), others)


def _of_subscript(program: Whole, node: ast.Subscript) -> Values:
    keys = [value.value for value in program.values(node.slice) if isinstance(value, Known)]
    found: set[Value] = set()
    for value in program.values(node.value):
        if value == Library("os.environ"):
            found.update(*map(ranks.by_variable, keys))
        elif isinstance(value, Several):
            for key in keys:
                if isinstance(key, int) and -len(value.items) <= key < len(value.items):
                    found |= program.values(value.items[key])
        elif isinstance(value, Element):
            found.add(value)
    if not found and keys and isinstance(keys[0], str):
        return ranks.by_name(keys[0])
    return frozenset(found)


_BY_KIND: dict[type[ast.expr], Callable[[Whole, Any], Values]] = {
    ast.Attribute: of_attribute,
    ast.Await: _of_inner,
    ast.BinOp: _of_binary,
    ast.BoolOp: _of_and_or,
    ast.Call: of_call,
    ast.Compare: _of_comparison,
    ast.Constant: _of_constant,
    ast.IfExp: _of_either,
    ast.Lambda: _of_lambda,
    ast.List: _of_several,
    ast.Name: of_name,
    ast.NamedExpr: _of_inner,
    ast.Set: _of_several,
    ast.Subscript: _of_subscript,
    ast.Tuple: _of_several,
    ast.UnaryOp: _of_unary,
}
