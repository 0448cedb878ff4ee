"""DL054: the loss is summed over ranks before the backward pass."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import rest_of_block
from drumline_lint.flow.loops import batch_loops, calls_made_in
from drumline_lint.program.names import COLLECTIVES, DDP, FSDP
from drumline_lint.program.origins import parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.ranks import is_world_size
from drumline_lint.program.tree import (
    FunctionNode,
    Loop,
    ancestors,
    dotted,
    last_name,
    nodes_in,
    statement_of,
)
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import is_method, wrapped_calls

RULE = rule("DL054")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`dist.all_reduce(loss)`, then `loss.backward()`."""
    if next(program.all_calls(DDP, *FSDP), None) is None:
        return
    wrapped_loops = [loop for loop in batch_loops(program, source) if wrapped_calls(program, loop)]
    for loop in wrapped_loops:
        yield from _divided(program, source, loop)
        yield from _reduced_by_helper(program, source, loop)
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


def _reduced_by_helper(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """`loss = reduce_mean(loss)`, then `loss.backward()`, where the helper changes what it is
    given."""
    owners = [call.func for call in nodes_in(loop, ast.Call) if is_method(call, "backward")]
    losses = [owner.value for owner in owners if isinstance(owner, ast.Attribute)]
    for call in (origin for loss in losses for origin in written_values(program, loss)):
        helper = program.function_of(call) if isinstance(call, ast.Call) else None
        is_here = helper is not None and program.source_of(call) is source
        if helper is not None and is_here and _changes_argument(program, helper):
            message = (
                f"{source.code(call)} reduces the loss in place, which its gradient does not know "
                "of, and DDP averages the gradients already"
            )
            yield RULE.at(source, call, message)


def _changes_argument(program: Program, helper: FunctionNode) -> bool:
    """Whether it reduces a parameter itself, and no copy of it."""
    reduced = [
        call.args[0]
        for call in nodes_in(helper, ast.Call)
        if program.name_of(call.func) == "torch.distributed.all_reduce" and call.args
    ]
    bindings = [program.bindings(tensor) for tensor in reduced if isinstance(tensor, ast.Name)]
    return any({binding.kind for binding in every} == {"parameter"} for every in bindings)


def _divided(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """`(loss / world_size).backward()` of a wrapped model."""
    calls = list(calls_made_in(program, loop))
    if any(program.name_of(call.func) in COLLECTIVES for call in calls):
        return  # what is divided may be a sum over ranks
    owners = [call.func for call in calls if is_method(call, "backward")]
    losses = [owner.value for owner in owners if isinstance(owner, ast.Attribute)]
    for division in (part for loss in losses for part in parts(program, loss)):
        is_by_ranks = (
            isinstance(division, ast.BinOp)
            and isinstance(division.op, ast.Div)
            and _is_number_of_ranks(program, division.right)
        )
        if is_by_ranks and program.source_of(division) is source and loop in ancestors(division):
            message = (
                f"{source.code(division)} divides the gradients by the number of ranks, "
                "and DDP does so again when it averages them"
            )
            yield RULE.at(source, division, message, fix="call backward on the loss itself")


def _is_number_of_ranks(program: Program, divisor: ast.expr) -> bool:
    origins = written_values(program, divisor)
    return is_world_size(divisor) or any(is_world_size(origin) for origin in origins)


def _goes_backward_later(call: ast.Call, loss: str) -> bool:
    """In the same block, also after `loss = loss / world_size`."""
    for statement in rest_of_block(statement_of(call)):
        for candidate in nodes_in(statement, ast.Call):
            owner = candidate.func.value if isinstance(candidate.func, ast.Attribute) else None
            if last_name(candidate.func) == "backward" and owner is not None:
                return loss in map(dotted, nodes_in(owner, ast.Name, ast.Attribute))
    return False
