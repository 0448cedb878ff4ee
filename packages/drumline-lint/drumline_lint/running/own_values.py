"""Conditions on what each rank has for itself: the loss of its own batch is not that of the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import LOOPS, Loop, above, end_position, inside, last_name, position, up
from drumline_lint.running.collectives import collectives_in

# The value stays that of this rank.
_KEEPING = ("item", "detach", "float", "mean", "sum", "cpu", "abs", "data", "any", "all")
_ASKING = ("isnan", "isinf", "isfinite", "is_nan")
_SHARING_WORDS = ("reduce", "gather", "sync", "broadcast", "across")
DEEPEST = 3


def own_loss_in(program: Program, test: ast.expr, loop: Loop) -> str:
    """The name of the loss of this rank that a condition in a training loop asks for; empty if it asks for none."""
    if not _is_asking(test) or _is_shared_before(program, test, loop) or not has_replicas(program):
        return ""
    losses = set(_losses(loop))
    for asked in inside(test, ast.Name, ast.Attribute):
        found = _loss_behind(program, asked, losses)
        if found:
            return found
    return ""


def has_replicas(program: Program) -> bool:
    """Whether a model is wrapped somewhere, so that its backward pass is a collective."""
    return program.remember("has replicas", lambda: next(program.all_calls(DDP, *FSDP), None) is not None)


def _losses(loop: Loop) -> Iterator[str]:
    """Of `loss.backward()`, `out.loss.backward()` and `scaler.scale(loss).backward()`."""
    parts = list(inside(loop, ast.Name, ast.Attribute))
    made = {ast.unparse(part) for part in parts if isinstance(part.ctx, ast.Store)}
    for call in inside(loop, ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            for part in inside(call.func.value, ast.Name, ast.Attribute):
                is_loss = isinstance(part, ast.Name) or _is_loss_of(part, made)
                if is_loss and not _is_owner(part, call.func):
                    yield ast.unparse(part)


def _is_owner(part: ast.Name | ast.Attribute, asked: ast.Attribute) -> bool:
    """Of something else: `args` of `args.weight * loss`, `scaler` of `scaler.scale(loss)`; `loss.mean()` is a loss."""
    outer = up(part)
    return isinstance(outer, ast.Attribute) and outer is not asked and outer.attr not in _KEEPING


def _is_loss_of(part: ast.Attribute, made: set[str]) -> bool:
    """`out.loss` where the loop makes `out` or its loss; not `args.aux_loss`, and not `args.loss_weight`."""
    text = ast.unparse(part)
    return part.attr.lower().endswith("loss") and (text in made or text.partition(".")[0] in made)


def _is_asking(test: ast.expr) -> bool:
    """Whether it may be another answer on another rank: a comparison of numbers, `isnan`; not `is None`."""
    if any(last_name(call.func) in _ASKING for call in inside(test, ast.Call)):
        return True
    if isinstance(test, ast.Name):
        return True
    orders = (ast.Gt, ast.GtE, ast.Lt, ast.LtE, ast.Eq, ast.NotEq)
    return any(isinstance(op, orders) for compare in inside(test, ast.Compare) for op in compare.ops)


def _is_shared_before(program: Program, test: ast.expr, loop: Loop) -> bool:
    """Whether ranks tell each other something earlier in the loop: it may be about this."""
    for _, chain in collectives_in(program, loop):
        if end_position(chain[0]) <= position(test):
            return True
    calls = [call for call in inside(loop, ast.Call) if position(call) <= end_position(test)]
    return any(word in last_name(call.func).lower() for call in calls for word in _SHARING_WORDS)


def _loss_behind(program: Program, asked: ast.Name | ast.Attribute, losses: set[str], depth: int = 0) -> str:
    if (text := ast.unparse(asked)) in losses:
        return text
    if isinstance(asked, ast.Attribute) or depth == DEEPEST:
        return ""
    for value in program.assigned(asked):
        inner = _kept(value)
        if isinstance(inner, ast.Name | ast.Attribute) and (
            found := _loss_behind(program, inner, losses, depth + 1)
        ):
            return found
    return ""


def _kept(value: ast.expr) -> ast.expr:
    """What is behind `.item()`, `float(...)`, `torch.isnan(...)`, `not`."""
    while True:
        if isinstance(value, ast.UnaryOp):
            value = value.operand
        elif isinstance(value, ast.Call) and last_name(value.func) in (*_KEEPING, *_ASKING):
            is_method = isinstance(value.func, ast.Attribute) and not value.args
            inner = value.func.value if is_method and isinstance(value.func, ast.Attribute) else None
            value = inner or (value.args[0] if value.args else ast.Constant(None))
        elif isinstance(value, ast.Attribute) and value.attr in _KEEPING:
            value = value.value
        else:
            return value


def is_joined(node: ast.AST) -> bool:
    """Whether it is in `with model.join():`, where ranks may stop early."""
    for outer in above(node):
        if isinstance(outer, ast.With):
            for item in outer.items:
                called = item.context_expr
                if isinstance(called, ast.Call) and last_name(called.func).lower() == "join":
                    return True
    return False


def loop_around(node: ast.AST) -> Loop | None:
    """The inmost loop of its function that it is in."""
    for outer in above(node):
        if isinstance(outer, LOOPS):
            return outer
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
    return None
