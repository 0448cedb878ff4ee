"""DL054: a collective without a gradient is between the model and the backward pass.

Autograd does not know the collectives of torch.distributed: what they change in place, or gather,
has no gradient, or a wrong one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import rest_of_block
from drumline_lint.flow.loops import batch_loops, has_gradients_off
from drumline_lint.program.names import DDP
from drumline_lint.program.origins import written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    FunctionNode,
    Loop,
    ancestors,
    called_name,
    dotted,
    enclosing_function,
    is_after,
    nodes_in,
    owner_of,
    parent_of,
    statement_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import is_method, wrapped_calls

RULE = rule("DL054")
_GATHERS = ("torch.distributed.all_gather", "torch.distributed.all_gather_into_tensor")
_LOSSES = ("cross_entropy", "CrossEntropyLoss", "logsumexp", "log_softmax")
# They take the form of a tensor, not its values.
_OF_FORM = ("zeros_like", "empty_like", "len", "size", "all_gather", "all_gather_into_tensor")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Losses that are reduced, and features that are gathered, before `backward()`.

    dist.all_reduce(loss)
    loss.backward()
    """
    if next(program.all_calls(DDP), None) is None:
        return

    for loop in batch_loops(program, source):
        if wrapped_calls(program, loop):
            yield from _reduced(program, source, loop)

    for call in program.calls(source, *_GATHERS):
        if _is_gathered_for_loss(program, call):
            message = (
                "gathered tensors have no gradient, and the loss is computed from nothing else"
            )
            yield RULE.at(source, call, message)


# Losses that are reduced.


def _reduced(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """Losses that are reduced before `loss.backward()`, here or in a function that returns them.

    loss = reduce_mean(loss)
    loss.backward()
    """
    message = "changes the loss in place before backward(), and DDP averages the gradients already"
    for call in nodes_in(loop, ast.Call):
        is_reduction = program.name_of(call.func) == "torch.distributed.all_reduce"
        if is_reduction and call.args and _goes_backward(call, dotted(call.args[0])):
            yield RULE.at(source, call, f"{source.code(call.func)} {message}")

        loss = owner_of(call) if is_method(call, "backward") else None
        for origin in written_values(program, loss):
            if not isinstance(origin, ast.Call) or not is_after(call, origin):
                continue
            if loop in ancestors(origin) and _reduces_argument(program, origin):
                yield RULE.at(source, origin, f"{source.code(origin)} {message}")


def _goes_backward(call: ast.Call, loss: str) -> bool:
    """Whether the next backward pass is of what was reduced.

    A loss that is reduced to be printed is often a copy: `shown = loss.detach()`.
    """
    for statement in rest_of_block(statement_of(call)):
        for later in nodes_in(statement, ast.Call):
            if is_method(later, "backward"):
                return bool(loss) and dotted(later.func.value) == loss

    return False


def _reduces_argument(program: Program, call: ast.Call) -> bool:
    """Whether a function of the given files reduces its parameter, and no copy of it.

    def reduce_mean(loss):
        dist.all_reduce(loss)
    """
    function = program.function_of(call)
    for inner in [] if function is None else nodes_in(function, ast.Call):
        if program.name_of(inner.func) != "torch.distributed.all_reduce":
            continue
        if inner.args and _is_parameter(program, inner.args[0]):
            return True

    return False


def _is_parameter(program: Program, name: ast.expr) -> bool:
    """Whether it is a parameter of its function, and nothing else is assigned to the name."""
    bindings = program.bindings(name) if isinstance(name, ast.Name) else []
    return {binding.kind for binding in bindings} == {"parameter"}


# Features that are gathered.


def _is_gathered_for_loss(program: Program, call: ast.Call) -> bool:
    """Whether features go into the loss of a caller only as they were gathered.

    def loss_of(features):
        dist.all_gather(parts, features)
        return cross_entropy(torch.cat(parts), labels)
    """
    function = enclosing_function(call)
    features = call.args[1] if call.args[1:] else None
    if isinstance(features, ast.Call) and called_name(features) == "contiguous":
        features = owner_of(features)
    if function is None or features is None or not _is_parameter(program, features):
        return False
    if _is_put_back(call, function) or has_gradients_off(program, call):
        return False

    callers = [function, *map(enclosing_function, program.callers(function))]
    losses = [caller for caller in callers if caller is not None and _has_loss(caller)]
    return any(_is_lost(program, caller, function.name) for caller in losses)


def _is_put_back(call: ast.Call, function: FunctionNode) -> bool:
    """Whether this rank's features, which have a gradient, replace the gathered ones.

    dist.all_gather(parts, features)
    parts[rank] = features
    """
    buffers = dotted(call.args[0])
    stored = [item for item in nodes_in(function, ast.Subscript) if isinstance(item.ctx, ast.Store)]
    return any(dotted(item.value) == buffers for item in stored)


def _has_loss(function: FunctionNode) -> bool:
    """Whether it computes a loss over all features: `cross_entropy(logits, labels)`."""
    return any(called_name(call) in _LOSSES for call in nodes_in(function, ast.Call))


def _is_lost(program: Program, function: FunctionNode, gather: str) -> bool:
    """Whether all that is gathered of its parameters is used in no other way.

    dist.all_gather(parts, features)  # `features` is lost
    logits = features @ torch.cat(parts).T  # but not with this line

    `torch.zeros_like(features)` takes only its form, and is no use of its values.
    """
    uses = [
        name
        for name in nodes_in(function, ast.Name)
        if isinstance(name.ctx, ast.Load) and _is_parameter(program, name)
    ]
    passed = [name for name in uses if not isinstance(parent_of(name), ast.Attribute)]
    gathered = {name.id for name in passed if _is_within(name, (gather,))}
    if not gathered:
        return False

    gathers = (*_OF_FORM, gather)
    return all(_is_within(name, gathers) for name in uses if name.id in gathered)


def _is_within(name: ast.Name, functions: tuple[str, ...]) -> bool:
    """Whether it is an argument of one of these functions, or a part of one."""
    calls = [outer for outer in ancestors(name) if isinstance(outer, ast.Call)]
    return any(called_name(call) in functions for call in calls)
