"""DL059: training calls the model inside DDP, not DDP."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.loops import calls_made_in, has_gradients_off
from drumline_lint.program.names import DDP
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import dotted, last_name, nodes_in, position, scope_of, statement_of
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import training_loops

RULE = rule("DL059")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`model.module(x)`, or the model by the name it had before, in a loop that trains."""
    for call in _bypassing(program):
        if program.source_of(call) is source:
            message = (
                f"{source.code(call.func)} is the model inside DDP: "
                "the gradients of this call are not averaged over ranks"
            )
            yield RULE.at(source, call, message)


@cached_query
def _bypassing(program: Program) -> list[ast.Call]:
    """Of all loops that train and call no wrapped model."""
    bypassing: list[ast.Call] = []
    for loop in training_loops(program) if next(program.all_calls(DDP), None) else ():
        calls = list(calls_made_in(program, loop))
        if not any(_is_wrapped(program, call) for call in calls):
            bypassing += [call for call in calls if _bypasses(program, call)]
    return bypassing


def _is_wrapped(program: Program, call: ast.Call) -> bool:
    return bool(program.made(call.func, DDP))


def _bypasses(program: Program, call: ast.Call) -> bool:
    if has_gradients_off(program, call):
        return False
    inner = call.func
    if isinstance(inner, ast.Attribute) and inner.attr == "module":
        return bool(program.made(inner.value, DDP))
    if isinstance(inner, ast.Attribute) and last_name(inner.value) == "module":
        return _is_inside(program, inner.value) and _goes_backward(call)
    return isinstance(inner, ast.Name) and any(
        _is_same(program, inner, wrapping) for wrapping in program.all_calls(DDP)
    )


def _is_inside(program: Program, module: ast.expr) -> bool:
    return isinstance(module, ast.Attribute) and bool(program.made(module.value, DDP))


def _goes_backward(call: ast.Call) -> bool:
    """`loss = model.module.loss(x)`, then `loss.backward()`."""
    statement = statement_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {dotted(target) for target in targets}
    losses = [
        candidate.func.value
        for candidate in nodes_in(scope_of(call), ast.Call)
        if isinstance(candidate.func, ast.Attribute) and candidate.func.attr == "backward"
    ]
    return any(
        dotted(part) in names for loss in losses for part in nodes_in(loss, ast.Name, ast.Attribute)
    )


def _is_same(program: Program, model: ast.Name, wrapping: ast.Call) -> bool:
    """Whether that call wraps this name, and gives the result to another."""
    wrapped = wrapping.args[0] if wrapping.args else None
    statement = statement_of(wrapping)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return (
        isinstance(wrapped, ast.Name)
        and scope_of(wrapped) is scope_of(model)
        and wrapped.id == model.id
        and position(wrapping) < position(model)
        and program.bindings(wrapped) == program.bindings(model)
        and all(isinstance(target, ast.Name) and target.id != model.id for target in targets)
    )
