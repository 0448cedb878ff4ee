"""DL054: the loss is summed over ranks before the backward pass."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import rest_of_block
from drumline_lint.flow.loops import batch_loops
from drumline_lint.program.names import DDP, FSDP
from drumline_lint.program.program import Program
from drumline_lint.program.tree import ancestors, dotted, last_name, nodes_in, statement_of
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import wrapped_calls

RULE = rule("DL054")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`dist.all_reduce(loss)`, then `loss.backward()`."""
    if next(program.all_calls(DDP, *FSDP), None) is None:
        return
    wrapped_loops = [loop for loop in batch_loops(program, source) if wrapped_calls(program, loop)]
    for call in program.calls(source, "torch.distributed.all_reduce"):
        attributes = nodes_in(call.args[0], ast.Attribute) if call.args else []
        is_gradient = any(part.attr == "grad" for part in attributes)
        if is_gradient and any(loop in ancestors(call) for loop in wrapped_loops):
            message = (
                "the gradients are averaged a second time: DDP has done it in the backward pass"
            )
            yield RULE.at(source, call, message, fix="delete it")
        loss = dotted(call.args[0]) if call.args else ""
        if loss and _goes_backward_later(call, loss):
            message = (
                f"{source.code(call.func)} changes {loss} in place, which its gradient does not "
                "know of, and DDP averages the gradients already"
            )
            yield RULE.at(source, call, message)


def _goes_backward_later(call: ast.Call, loss: str) -> bool:
    """In the same block, also after `loss = loss / world_size`."""
    for statement in rest_of_block(statement_of(call)):
        for candidate in nodes_in(statement, ast.Call):
            owner = candidate.func.value if isinstance(candidate.func, ast.Attribute) else None
            if last_name(candidate.func) == "backward" and owner is not None:
                return loss in map(dotted, nodes_in(owner, ast.Name, ast.Attribute))
    return False
