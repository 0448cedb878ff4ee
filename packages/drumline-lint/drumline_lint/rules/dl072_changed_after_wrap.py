"""DL072: the parameters of a model are changed after DDP has read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.loops import batch_loops
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.names import DDP, SYNC_BATCH_NORM
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    ancestors,
    called_name,
    calls_beside,
    dotted,
    is_after,
    nodes_in,
    scope_of,
    statement_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wrapped

RULE = rule("DL072", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Layers that are converted, and parameters that are frozen or trained, after the wrap."""
    for call in program.calls(source, SYNC_BATCH_NORM):
        model = call.args[0] if call.args else None
        wraps = program.made(model, DDP) if isinstance(model, ast.Name) else []
        if any(is_after(call, wrap.call) for wrap in wraps):
            message = "the layers are replaced inside DDP, which has registered those before"
            yield RULE.at(source, call, message, fix="convert the model first, then wrap it in DDP")
    for wrapping in program.calls(source, DDP):
        if not _may_change(program, wrapping):
            for change in _changes_after(program, wrapping):
                message = "requires_grad changes after DDP has registered the parameters"
                yield RULE.at(source, change, message)


def _may_change(program: Program, wrapping: ast.Call) -> bool:
    """Whether DDP looks for unused parameters, or the model is wrapped again later."""
    options = [argument(wrapping, None, "find_unused_parameters")]
    options.append(argument(wrapping, None, "static_graph"))
    calls = calls_beside(wrapping)
    again = [call for call in calls if program.name_of(call.func) == DDP and call is not wrapping]
    return any(options) or has_unknown_arguments(wrapping) or bool(again)


def _changes_after(program: Program, wrapping: ast.Call) -> Iterator[ast.AST]:
    """Between the wrap and the batches that are trained on, or between epochs."""
    names = _names(wrapping)
    batches: set[ast.AST] = set(batch_loops(program, program.source_of(wrapping)))
    places: list[ast.AST] = [
        loop
        for loop in nodes_in(scope_of(wrapping), ast.For)
        if _is_of(loop.iter, names, "parameters") and _sets_gradients(loop)
    ]
    for call in calls_beside(wrapping):
        function = program.function_of(call)
        is_given = any(dotted(value).partition(".")[0] in names for value in _owners(call))
        if called_name(call) == "requires_grad_" or (function and _sets_gradients(function)):
            places += [call] if is_given else []
    for place in places:
        is_later = is_after(place, wrapping) and not batches & {*ancestors(place)}
        if is_later and _is_before_training(place, batches):
            yield place


def _names(wrapping: ast.Call) -> set[str]:
    """Of the wrapped model and of the one inside."""
    statement = statement_of(wrapping)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    inner = wrapped(wrapping)
    nodes = [*targets, *([] if inner is None else [inner])]
    return {dotted(node) for node in nodes} - {""}


def _owners(call: ast.Call) -> list[ast.expr]:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return [*call.args, *([] if owner is None else [owner])]


def _is_of(iterated: ast.expr, names: set[str], method: str) -> bool:
    calls = nodes_in(iterated, ast.Call)
    methods = [call.func for call in calls if called_name(call).endswith(method)]
    owners = [func.value for func in methods if isinstance(func, ast.Attribute)]
    return any(dotted(owner).partition(".")[0] in names for owner in owners)


def _sets_gradients(node: ast.AST) -> bool:
    """`p.requires_grad = ...` for the parameters that a loop goes over."""
    calls = [call for loop in nodes_in(node, ast.For) for call in nodes_in(loop, ast.Call)]
    return any(called_name(call) == "requires_grad_" for call in calls) or any(
        isinstance(target, ast.Attribute) and target.attr == "requires_grad"
        for loop in nodes_in(node, ast.For)
        for statement in nodes_in(loop, ast.Assign)
        for target in statement.targets
    )


def _is_before_training(place: ast.AST, batches: set[ast.AST]) -> bool:
    """Whether a loop over batches comes after it, also in a function that it is followed by."""
    scope = scope_of(place)
    is_followed = any(is_after(loop, place) for loop in batches if scope_of(loop) is scope)
    functions = {getattr(scope_of(loop), "name", "") for loop in batches}
    calls = [call for call in calls_beside(place) if is_after(call, place)]
    return is_followed or any(called_name(call) in functions - {""} for call in calls)
