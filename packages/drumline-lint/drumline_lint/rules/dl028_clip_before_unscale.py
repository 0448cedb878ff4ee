"""DL028: gradients are clipped while they are still scaled.

A GradScaler multiplies the loss by a large number, and so the gradients. A limit of 1.0 then clips
nearly all of them to nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import are_exclusive
from drumline_lint.flow.loops import calls_made_in
from drumline_lint.program.program import Program
from drumline_lint.program.tree import owner_of, scope_of
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import is_method, is_scaler, training_loops

RULE = rule("DL028")
_CLIPS = (
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grad_norm",
    "torch.nn.utils.clip_grads_with_norm_",
    "torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Every clip that comes after a scaled backward, with nothing in between.

    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    """
    for clip in program.calls(source, *_CLIPS):
        rounds = [calls_made_in(program, loop) for loop in training_loops(program)]
        around = [calls for calls in rounds if clip in calls]

        for calls in around or [calls_made_in(program, scope_of(clip))]:
            scaler = _scaler_before(program, calls, clip)
            if scaler:
                message = (
                    f"{source.code(clip.func)} clips gradients that {scaler} has scaled "
                    "and not yet unscaled"
                )
                fix = f"call {scaler}.unscale_(optimizer) before it"
                yield RULE.at(source, clip, message, fix=fix)
                break


def _scaler_before(program: Program, calls: list[ast.Call], clip: ast.Call) -> str:
    """The scaler that scaled a loss before the clip, if nothing was unscaled.

    `scaler` for `scaler.scale(loss).backward()`, unless `scaler.unscale_(optimizer)` is in between.
    """
    before = calls[: calls.index(clip)] if clip in calls else []
    if any(is_method(call, "unscale_", "unscale_gradients") for call in before):
        return ""

    for call in before:
        scaler = owner_of(call)
        if scaler is None or not is_method(call, "scale") or not is_scaler(program, scaler):
            continue
        if not are_exclusive(program, call, clip):
            return program.source_of(call).code(scaler)

    return ""
