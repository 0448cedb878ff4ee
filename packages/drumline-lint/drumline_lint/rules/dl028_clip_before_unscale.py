"""DL028: gradients are clipped while they are still scaled."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import are_exclusive
from drumline_lint.flow.loops import calls_made_in
from drumline_lint.program.program import Program
from drumline_lint.program.queries import cached_query
from drumline_lint.program.tree import enclosing_function
from drumline_lint.program.value import CallResult
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import SCALERS, is_method, is_scaler, training_loops

RULE = rule("DL028")
CLIPS = (
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grad_norm",
    "torch.nn.utils.clip_grads_with_norm_",
)
CLIP_OF_FSDP = "torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_"


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Every clip that comes after a scaled backward, with nothing in between."""
    for clip in program.calls(source, *CLIPS, CLIP_OF_FSDP):
        for around in _around(program, clip):
            scaler = _scaler_before(program, around, clip)
            if scaler:
                yield RULE.at(
                    source,
                    clip,
                    f"{source.code(clip.func)} clips gradients that {scaler} has scaled and not yet unscaled",
                    fix=f"call {scaler}.unscale_(optimizer) before it",
                )
                break


def _around(program: Program, clip: ast.Call) -> list[list[ast.Call]]:
    """The rounds of training that come to the clip, as the calls that they make; or else its own
    function's."""
    rounds = [calls for calls in _rounds(program) if clip in calls]
    function = enclosing_function(clip)
    if rounds or function is None:
        return rounds
    return [list(calls_made_in(program, function))]


@cached_query
def _rounds(program: Program) -> list[list[ast.Call]]:
    return [list(calls_made_in(program, loop)) for loop in training_loops(program)]


def _scaler_before(program: Program, calls: list[ast.Call], clip: ast.Call) -> str:
    """The scaler that scaled a loss before the clip, if nothing was unscaled."""
    before = calls[: calls.index(clip)]
    if any(is_method(call, "unscale_", "unscale_gradients") for call in before):
        return ""
    for call in before:
        if is_method(call, "scale") and not are_exclusive(program, call, clip):
            assert isinstance(call.func, ast.Attribute)
            if _is_known_scaler(program, call.func.value):
                return program.source_of(call).code(call.func.value)
    return ""


def _is_known_scaler(program: Program, expression: ast.expr) -> bool:
    made = [value for value in program.values(expression) if isinstance(value, CallResult)]
    return is_scaler(program, expression) and (
        not made or all(value.name in SCALERS for value in made)
    )
