"""DL059: training calls the model inside DDP, not DDP."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.loops import calls_made_in, has_gradients_off
from drumline_lint.program.names import DDP
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import ancestors, last_name, nodes_in, parent_of, scope_of
from drumline_lint.reading.source import Source
from drumline_lint.training.models import is_wrapped_by
from drumline_lint.training.steps import training_loops

RULE = rule("DL059")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`model.module(x)`, or the model by the name it had before, in a loop that trains."""
    lost = [call for call in program.calls(source, DDP) if _is_lost(program, call)]
    for call in lost:
        model = source.code(call.args[0])
        message = f"the result of {source.code(call.func)} is lost: {model} trains without it"
        yield RULE.at(source, call, message, fix=f"write {model} = {source.code(call)}")
    scopes = [scope_of(call) for call in lost]
    for call in _bypassing(program):
        if program.source_of(call) is source and scope_of(call) not in scopes:
            message = (
                f"{source.code(call.func)} is the model inside DDP: "
                "the gradients of this call are not averaged over ranks"
            )
            yield RULE.at(source, call, message)


def _is_lost(program: Program, call: ast.Call) -> bool:
    """`DDP(model)` as a statement; a test may want no more than its exception."""
    is_statement = isinstance(parent_of(call), ast.Expr) and bool(call.args)
    is_tried = any(isinstance(outer, ast.Try | ast.With) for outer in ancestors(call))
    return is_statement and not is_tried and not program.source_of(call).is_test


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
    if isinstance(inner, ast.Attribute) and inner.attr == "forward":
        inner = inner.value
    if isinstance(inner, ast.Attribute) and inner.attr == "module":
        return bool(program.made(inner.value, DDP))
    if isinstance(inner, ast.Attribute) and last_name(inner.value) == "module":
        return _is_inside(program, inner.value) and _goes_backward(program, call)
    return isinstance(inner, ast.Name) and any(
        is_wrapped_by(program, inner, wrapping) for wrapping in program.all_calls(DDP)
    )


def _is_inside(program: Program, module: ast.expr) -> bool:
    return isinstance(module, ast.Attribute) and bool(program.made(module.value, DDP))


def _goes_backward(program: Program, call: ast.Call) -> bool:
    """`loss = model.module.loss(x)`, then `loss.backward()`, with any number of steps between."""
    losses = [
        candidate.func.value
        for candidate in nodes_in(scope_of(call), ast.Call)
        if isinstance(candidate.func, ast.Attribute) and candidate.func.attr == "backward"
    ]
    return any(call in parts(program, loss) for loss in losses)
