"""DL072: the parameters of a model are changed after DDP has read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.loops import loop_around
from drumline_lint.program.names import DDP, SYNC_BATCH_NORM
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    block_of,
    dotted,
    last_name,
    nodes_in,
    position,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import CallResult, Instance
from drumline_lint.reading.source import Source

RULE = rule("DL072", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Layers that are replaced, frozen or converted in the function that wraps the model, after
    it does."""
    for call in program.calls(source, SYNC_BATCH_NORM):
        if call.args and _is_wrapped_before(program, call):
            message = "the layers are replaced inside DDP, which has read those before"
            yield RULE.at(source, call, message, fix="convert the model first, then wrap it in DDP")
    for wrapping in program.calls(source, DDP):
        model = _target(wrapping)
        for statement in _assignments_after(wrapping) if model else ():
            change = _change(program, statement, model)
            if change and not any(conditions(program, statement)):
                yield RULE.at(source, statement, f"{change} after DDP has read the parameters")


def _is_wrapped_before(program: Program, conversion: ast.Call) -> bool:
    """Whether the last assignment of what is converted, in the same block, wraps it."""
    model = dotted(conversion.args[0])
    statement = statement_of(conversion)
    block = block_of(statement)
    before = block[: block.index(statement)] if statement in block else []
    values = [
        assignment.value
        for assignment in before
        if isinstance(assignment, ast.Assign) and dotted(assignment.targets[0]) == model
    ]
    last = values[-1] if model and values else None
    return isinstance(last, ast.Call) and program.name_of(last.func) == DDP


def _target(wrapping: ast.Call) -> str:
    statement = statement_of(wrapping)
    is_plain = isinstance(statement, ast.Assign) and statement.value is wrapping
    return dotted(statement.targets[0]) if isinstance(statement, ast.Assign) and is_plain else ""


def _assignments_after(wrapping: ast.Call) -> list[ast.Assign]:
    statements = nodes_in(scope_of(wrapping), ast.Assign)
    return [statement for statement in statements if position(statement) > position(wrapping)]


def _change(program: Program, statement: ast.Assign, model: str) -> str:
    """What an assignment changes of the model, in words; empty if nothing."""
    target = statement.targets[0]
    if not isinstance(target, ast.Attribute):
        return ""
    if target.attr == "requires_grad":
        return "a parameter is frozen or trained" if _is_parameter(statement, model) else ""
    is_inside = dotted(target).startswith(f"{model}.module.")
    is_layer = is_inside and any(
        (isinstance(value, Instance) and program.is_module(value.of))
        or (isinstance(value, CallResult) and value.name.startswith("torch.nn."))
        for value in program.values(_unmoved(statement.value))
    )
    return f"{dotted(target)} is replaced" if is_layer else ""


def _unmoved(value: ast.expr) -> ast.expr:
    """The layer of `layer.to(device)`."""
    is_move = isinstance(value, ast.Call) and last_name(value.func) in ("to", "cuda")
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and is_move:
        return value.func.value
    return value


def _is_parameter(statement: ast.Assign, model: str) -> bool:
    """Of a loop over the parameters of the wrapped model, outside of training."""
    loop = loop_around(statement)
    if not isinstance(loop, ast.For) or loop_around(loop) is not None:
        return False
    owners = [dotted(name) for name in nodes_in(loop.iter, ast.Attribute)]
    return any(owner.startswith(f"{model}.module.") for owner in owners)
