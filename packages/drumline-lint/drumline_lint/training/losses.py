"""What is done with a loss: a backward is called on it, and it is changed in place."""

from __future__ import annotations

import ast

from drumline_lint.program.program import Program
from drumline_lint.program.tree import Binding, dotted, last_name, scope_node


def goes_backward(program: Program, expression: ast.Name | ast.Attribute) -> bool:
    """Whether `.backward()` is called on it: then a step has computed it, whatever made it."""
    written = dotted(expression)
    calls = program.index(program.source_of(expression)).calls.get("backward", ()) if written else ()
    return any(
        dotted(one) == written and set(_bindings(program, one)) & set(_bindings(program, expression))
        for one in map(_differentiated, calls)
        if one is not None and scope_node(one) is scope_node(expression)
    )


def _differentiated(call: ast.Call) -> ast.expr | None:
    """The loss in `loss.backward()`, `(loss / n).backward()` and `scaler.scale(loss).backward()`."""
    loss = call.func.value if isinstance(call.func, ast.Attribute) and not call.args else None
    if isinstance(loss, ast.Call) and last_name(loss.func) == "scale" and loss.args:
        loss = loss.args[0]
    if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
        loss = loss.left
    return loss


def _bindings(program: Program, expression: ast.expr) -> list[Binding]:
    """Of the name that `outputs.loss` begins with."""
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return program.bindings(expression) if isinstance(expression, ast.Name) else []


def before_changes(program: Program, name: ast.Name) -> dict[ast.Name, ast.AugAssign]:
    """Of what `mean /= n` made: the name as it was before, for each such change that it may have gone through."""
    found: dict[ast.Name, ast.AugAssign] = {}
    pending = [name]
    while pending:
        for binding in program.bindings(pending.pop()):
            change = binding.node
            target = change.target if isinstance(change, ast.AugAssign) else None
            if isinstance(change, ast.AugAssign) and isinstance(target, ast.Name) and target not in found:
                found[target] = change
                pending.append(target)
    return found
