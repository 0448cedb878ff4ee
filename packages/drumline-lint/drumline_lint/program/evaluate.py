"""What an expression may be, by the kind of its node."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from drumline_lint.program import ranks
from drumline_lint.program.bindings import of_name
from drumline_lint.program.functions import called_as, name_of_owner, returned
from drumline_lint.program.members import of_attribute
from drumline_lint.program.names import SYNC_BATCH_NORM
from drumline_lint.program.queries import ProgramView, any_of
from drumline_lint.program.tree import last_name
from drumline_lint.program.value import (
    NOTHING,
    CallResult,
    Class,
    ConstantValue,
    Function,
    Instance,
    Items,
    Library,
    LoopItem,
    Method,
    Rank,
    RankTest,
    Value,
    Values,
)

# They give back what they were given, or something that stands for it.
PASSED_THROUGH = {
    "int",
    "list",
    "tuple",
    "bool",
    "iter",
    "copy.copy",
    "copy.deepcopy",
    "torch.compile",
    "torch.jit.script",
    SYNC_BATCH_NORM,
    "typing.cast",
}
PASSING_METHODS = set("bfloat16 compile cpu cuda double eval float half requires_grad_ share_memory to train".split())


def of_call(program: ProgramView, node: ast.Call) -> Values:
    found: set[Value] = set()
    callees = program.values(node.func)
    for callee in callees:
        found |= _called(program, callee, node)
    if not found and last_name(node.func):
        named = frozenset(callee for callee in callees if isinstance(callee, Rank | RankTest))
        return named or ranks.by_name(last_name(node.func))
    return frozenset(found)


def _called(program: ProgramView, callee: Value, node: ast.Call) -> Values:
    if isinstance(callee, Library):
        return _called_library(program, callee.name, node)
    if isinstance(callee, Method):
        if callee.name in PASSING_METHODS:
            return frozenset({callee.of})
        return frozenset({CallResult(f"{name_of_owner(program, callee.of)}.{callee.name}", node)})
    if isinstance(callee, Function):
        return returned(program, callee.node)
    if isinstance(callee, Class):
        return frozenset({Instance(callee.node)})
    if isinstance(callee, Instance):
        return frozenset({CallResult(f"{callee.of.name}.{called_as(program, callee.of)}", node)})
    if isinstance(callee, CallResult):
        return frozenset({CallResult(f"{callee.name}()", node)})
    return frozenset({callee}) if isinstance(callee, RankTest | Rank) else NOTHING


def _called_library(program: ProgramView, name: str, node: ast.Call) -> Values:
    if name in ranks.OF_FUNCTION:
        return frozenset({Rank("group" if node.args or node.keywords else ranks.OF_FUNCTION[name])})
    if name in ("os.getenv", "os.environ.get"):
        keys = program.values(node.args[0]) if node.args else NOTHING
        return frozenset().union(*(ranks.by_variable(key.value) for key in keys if isinstance(key, ConstantValue)))
    if name in PASSED_THROUGH and node.args:
        passed = program.values(node.args[-1] if name == "typing.cast" else node.args[0])
        return passed or frozenset({CallResult(name, node)})
    return frozenset({CallResult(name, node)})


def evaluate(program: ProgramView, expression: ast.expr) -> Values:
    by_kind = _BY_KIND.get(expression.__class__)
    return NOTHING if by_kind is None else by_kind(program, expression)


def _of_constant(program: ProgramView, node: ast.Constant) -> Values:
    return frozenset({ConstantValue(node.value)})


def _of_lambda(program: ProgramView, node: ast.Lambda) -> Values:
    return frozenset({Function(node)})


def _of_several(program: ProgramView, node: ast.Tuple | ast.List | ast.Set) -> Values:
    return frozenset({Items(tuple(node.elts))})


def _of_inner(program: ProgramView, node: ast.NamedExpr | ast.Await) -> Values:
    return program.values(node.value)


def _of_either(program: ProgramView, node: ast.IfExp) -> Values:
    return program.values(node.body) | program.values(node.orelse)


def _of_and_or(program: ProgramView, node: ast.BoolOp) -> Values:
    about = [ranks.is_about_being_distributed(one) for one in node.values]
    return ranks.combined(node.op, [program.values(one) for one in node.values], about)


def _of_unary(program: ProgramView, node: ast.UnaryOp) -> Values:
    inner = program.values(node.operand)
    if isinstance(node.op, ast.Not):
        return ranks.negated(inner)
    if isinstance(node.op, ast.USub):
        return frozenset(
            ConstantValue(-v.value) for v in inner if isinstance(v, ConstantValue) and isinstance(v.value, int)
        )
    return NOTHING


def _of_binary(program: ProgramView, node: ast.BinOp) -> Values:
    # A sum of a thousand terms is a thousand deep; ranks are found in short ones.
    return ranks.computed(node.op, program.values(node.left), program.values(node.right))


def _of_comparison(program: ProgramView, node: ast.Compare) -> Values:
    if len(node.ops) != 1:
        return NOTHING
    right = node.comparators[0]
    if ranks.is_world_size(right) or ranks.is_world_size(node.left):
        return NOTHING
    others = program.values(right)
    for value in list(others):
        if isinstance(value, Items):
            others = any_of(program, value.items)
    return ranks.compared(node.ops[0], program.values(node.left), others)


def _of_subscript(program: ProgramView, node: ast.Subscript) -> Values:
    keys = [value.value for value in program.values(node.slice) if isinstance(value, ConstantValue)]
    found: set[Value] = set()
    for value in program.values(node.value):
        if value == Library("os.environ"):
            found.update(*map(ranks.by_variable, keys))
        elif isinstance(value, Items):
            for key in keys:
                if isinstance(key, int) and -len(value.items) <= key < len(value.items):
                    found |= program.values(value.items[key])
        elif isinstance(value, LoopItem):
            found.add(value)
    if not found and keys and isinstance(keys[0], str):
        return ranks.by_name(keys[0])
    return frozenset(found)


_BY_KIND: dict[type[ast.expr], Callable[[ProgramView, Any], Values]] = {
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
