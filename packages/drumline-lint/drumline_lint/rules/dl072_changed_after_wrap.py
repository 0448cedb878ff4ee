"""DL072: the parameters of a model are changed after DDP has read them.

DDP registers the parameters that need a gradient when it wraps a model, and looks at them only once.
"""

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
    owner_of,
    scope_of,
    statement_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.models import wrapped

RULE = rule("DL072", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Layers that are converted, and parameters that are frozen or trained, after the wrap.

    For example:

        model = DDP(model)
        for parameter in model.module.backbone.parameters():
            parameter.requires_grad = False
    """
    yield from _converted(program, source)

    for wrapping in program.calls(source, DDP):
        if not _may_change(program, wrapping):
            for change in _changes_after(program, wrapping):
                message = "requires_grad changes after DDP has registered the parameters"
                yield RULE.at(source, change, message)


def _converted(program: Program, source: Source) -> Iterator[Finding]:
    """Layers that are replaced after the wrap.

    For example:

        model = DDP(model)
        model = SyncBatchNorm.convert_sync_batchnorm(model)
    """
    for call in program.calls(source, SYNC_BATCH_NORM):
        model = call.args[0] if call.args else None
        wraps = program.made(model, DDP) if isinstance(model, ast.Name) else []
        if any(is_after(call, wrap.call) for wrap in wraps):
            message = "the layers are replaced inside DDP, which has registered those before"
            yield RULE.at(source, call, message, fix="convert the model first, then wrap it in DDP")


def _may_change(program: Program, wrapping: ast.Call) -> bool:
    """Whether DDP looks for unused parameters, or the model is wrapped again later.

    For example:

        model = DDP(model, find_unused_parameters=True)
    """
    if has_unknown_arguments(wrapping) or argument(wrapping, None, "static_graph"):
        return True
    if argument(wrapping, None, "find_unused_parameters"):
        return True

    wraps = [call for call in calls_beside(wrapping) if program.name_of(call.func) == DDP]
    return any(call is not wrapping for call in wraps)


# Changes of parameters


def _changes_after(program: Program, wrapping: ast.Call) -> Iterator[ast.AST]:
    """Between the wrap and the batches that are trained on, or between epochs.

    For example:

        model = DDP(model)
        for epoch in range(epochs):
            model.module.backbone.requires_grad_(epoch > 2)
            for batch in loader:
                ...
    """
    names = _names(wrapping)
    batches: set[ast.AST] = set(batch_loops(program, program.source_of(wrapping)))

    for change in (*_changing_loops(wrapping, names), *_changing_calls(program, wrapping, names)):
        is_later = is_after(change, wrapping) and batches.isdisjoint(ancestors(change))
        if is_later and _is_before_training(change, batches):
            yield change


def _names(wrapping: ast.Call) -> set[str]:
    """Of the wrapped model and of the one inside: `ddp` and `model` of `ddp = DDP(model)`."""
    statement = statement_of(wrapping)
    nodes = [*statement.targets] if isinstance(statement, ast.Assign) else []
    inner = wrapped(wrapping)
    if inner is not None:
        nodes.append(inner)
    return {dotted(node) for node in nodes} - {""}


def _changing_loops(wrapping: ast.Call, names: set[str]) -> Iterator[ast.AST]:
    """Loops over the parameters of one of these models.

    For example:

        for name, parameter in model.module.named_parameters():
            parameter.requires_grad = "head" in name
    """
    for loop in nodes_in(scope_of(wrapping), ast.For):
        calls = nodes_in(loop.iter, ast.Call)
        owners = [owner_of(call) for call in calls if called_name(call).endswith("parameters")]
        if any(_is_of(owner, names) for owner in owners) and _sets_gradients(loop):
            yield loop


def _changing_calls(program: Program, wrapping: ast.Call, names: set[str]) -> Iterator[ast.AST]:
    """Calls that change the parameters of one of these models, or of a part of it.

        model.module.backbone.requires_grad_(False)
        freeze(model)

    `freeze` is a function that has such a loop.
    """
    for call in calls_beside(wrapping):
        if not any(_is_of(value, names) for value in (*call.args, owner_of(call))):
            continue

        function = program.function_of(call)
        if called_name(call) == "requires_grad_" or (function and _sets_gradients(function)):
            yield call


def _is_of(value: ast.expr | None, names: set[str]) -> bool:
    """Whether it is one of these, or a part of it: `model.module` of `model`."""
    return value is not None and dotted(value).partition(".")[0] in names


def _sets_gradients(node: ast.AST) -> bool:
    """Whether a loop in it sets what it goes over.

    For example:

        for parameter in parameters:
            parameter.requires_grad = False
    """
    for loop in nodes_in(node, ast.For):
        for call in nodes_in(loop, ast.Call):
            if called_name(call) == "requires_grad_":
                return True

        for assignment in nodes_in(loop, ast.Assign):
            for target in assignment.targets:
                if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
                    return True

    return False


def _is_before_training(change: ast.AST, batches: set[ast.AST]) -> bool:
    """Whether a loop over batches comes after it, also in a function that it is followed by.

    For example:

        freeze(model)
        train_one_epoch(model, loader)
    """
    scope = scope_of(change)
    if any(scope_of(loop) is scope and is_after(loop, change) for loop in batches):
        return True

    functions = {getattr(scope_of(loop), "name", "") for loop in batches} - {""}
    later = [call for call in calls_beside(change) if is_after(call, change)]
    return any(called_name(call) in functions for call in later)
