"""What an expression may be, by the kind of its node."""

from __future__ import annotations

import ast

from drumline_lint.program import ranks
from drumline_lint.program.bindings import of_name
from drumline_lint.program.functions import called_as, name_of_owner, returned
from drumline_lint.program.members import of_attribute, of_item
from drumline_lint.program.names import SYNC_BATCH_NORM
from drumline_lint.program.queries import ProgramView, any_of, entries
from drumline_lint.program.tree import last_name
from drumline_lint.program.value import (
    NOTHING,
    CallResult,
    Class,
    ConstantValue,
    Entries,
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
    of_constant,
    union,
)

# They return their argument, or an equivalent.
PASSED_THROUGH = {
    SYNC_BATCH_NORM,
    *"int list tuple bool iter copy.copy copy.deepcopy torch.compile torch.jit.script typing.cast".split(),
}
PASSING_METHODS = set(
    "bfloat16 compile cpu cuda double eval float half requires_grad_ share_memory to train".split()
)


def of_call(program: ProgramView, node: ast.Call) -> Values:
    callees = program.values(node.func)
    values = union(_called(program, callee, node) for callee in callees)
    if not values and last_name(node.func):
        named = frozenset(callee for callee in callees if isinstance(callee, (Rank, RankTest)))
        return named or ranks.by_name(last_name(node.func))
    return values


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
    return frozenset({callee}) if isinstance(callee, (RankTest, Rank)) else NOTHING


def _called_library(program: ProgramView, name: str, node: ast.Call) -> Values:
    if name in ranks.OF_FUNCTION:
        return frozenset({Rank("group" if node.args or node.keywords else ranks.OF_FUNCTION[name])})
    if name in ("os.getenv", "os.environ.get"):
        keys = program.values(node.args[0]) if node.args else NOTHING
        return frozenset().union(
            *(ranks.by_variable(key.value) for key in keys if isinstance(key, ConstantValue))
        )
    if name in PASSED_THROUGH and node.args:
        passed = program.values(node.args[-1] if name == "typing.cast" else node.args[0])
        return passed or frozenset({CallResult(name, node)})
    return frozenset({CallResult(name, node)})


def evaluate(program: ProgramView, expression: ast.expr) -> Values:
    values: Values = NOTHING
    match expression:
        case ast.Name():
            values = of_name(program, expression)
        case ast.Attribute():
            values = of_attribute(program, expression)
        case ast.Call():
            values = of_call(program, expression)
        case ast.Constant():
            values = of_constant(expression.value)
        case ast.Subscript():
            values = _of_subscript(program, expression)
        case ast.Compare():
            values = _of_comparison(program, expression)
        # a sum of a thousand terms is a thousand levels deep; ranks occur in short ones
        case ast.BinOp():
            values = _of_arithmetic(program, expression)
        case ast.BoolOp():
            values = ranks.combined(
                expression, [program.values(operand) for operand in expression.values]
            )
        case ast.UnaryOp():
            values = _of_unary(program, expression)
        case ast.Tuple() | ast.List() | ast.Set():
            values = frozenset({Items(tuple(expression.elts))})
        case ast.Dict():
            values = frozenset({Entries(tuple(expression.keys), tuple(expression.values))})
        case ast.ListComp():
            values = frozenset({Entries((None,), (expression.elt,))})
        case ast.DictComp():
            values = frozenset({Entries((None,), (expression.value,))})
        case ast.IfExp():
            values = program.values(expression.body) | program.values(expression.orelse)
        case ast.NamedExpr() | ast.Await():
            values = program.values(expression.value)
        case ast.Lambda():
            values = frozenset({Function(expression)})
    return values


def _of_arithmetic(program: ProgramView, node: ast.BinOp) -> Values:
    """Also `number * count + gpu`: what is added to a product is the last part of a global rank."""
    values = ranks.computed(node.op, program.values(node.left), program.values(node.right))
    sides = (node.left, node.right)
    products = [
        side for side in sides if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult)
    ]
    if isinstance(node.op, ast.Add) and products and values & {Rank("local"), Rank("spawned")}:
        return frozenset({Rank("global")})
    return values


def _of_unary(program: ProgramView, node: ast.UnaryOp) -> Values:
    inner = program.values(node.operand)
    if isinstance(node.op, ast.Not):
        return ranks.negated(inner)
    if isinstance(node.op, ast.USub):
        return frozenset(
            ConstantValue(-v.value)
            for v in inner
            if isinstance(v, ConstantValue) and isinstance(v.value, int)
        )
    return NOTHING


def _of_comparison(program: ProgramView, node: ast.Compare) -> Values:
    if len(node.ops) != 1:
        return NOTHING
    right = node.comparators[0]
    if ranks.is_world_size(right) or ranks.is_world_size(node.left):
        return NOTHING
    # one helper may read RANK and WORLD_SIZE from the environment
    if last_name(node.left) in ("size", "my_size", "comm_size"):
        return NOTHING
    right_values = program.values(right)
    for value in list(right_values):
        if isinstance(value, Items):
            right_values = any_of(program, value.items)
    return ranks.compared(node.ops[0], program.values(node.left), right_values)


def _of_subscript(program: ProgramView, node: ast.Subscript) -> Values:
    keys = [value.value for value in program.values(node.slice) if isinstance(value, ConstantValue)]
    values: set[Value] = set()
    for value in program.values(node.value):
        if value == Library("os.environ"):
            values.update(*map(ranks.by_variable, keys))
        elif isinstance(value, Items):
            for key in keys:
                if isinstance(key, int) and -len(value.items) <= key < len(value.items):
                    values |= program.values(value.items[key])
        elif isinstance(value, LoopItem):
            values.add(value)
        else:
            values |= entries(program, value, keys)
    if not values and keys and isinstance(keys[0], str):
        return of_item(program, node.value, keys[0])
    return frozenset(values)
