"""DL060: a GradScaler is only half used."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.loops import batch_loops, calls_made_in
from drumline_lint.program.program import Program
from drumline_lint.program.tree import owner_of
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import every_nth, is_method, is_optimizer, is_scaler

RULE = rule("DL060", only_distributed=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Scaled gradients that the optimizer applies itself, and `unscale_` at every micro-batch."""
    for loop in batch_loops(program, source) if ".scale(" in source.text else ():
        calls = [
            call
            for call in calls_made_in(program, loop)
            if is_method(call, "scale", "step", "unscale_") and program.source_of(call) is source
        ]
        of_scaler = [call for call in calls if _is_of_scaler(program, call)]
        steps = [call for call in of_scaler if is_method(call, "step")]
        is_scaled = any(is_method(call, "scale") for call in of_scaler)
        for call in calls if is_scaled and not steps else ():
            owner = owner_of(call)
            if is_method(call, "step") and owner is not None and is_optimizer(program, owner):
                message = (
                    f"{source.code(call)} applies gradients that are still scaled: "
                    "the scaler neither unscales them nor skips an overflow"
                )
                fix = "call scaler.step(optimizer) and scaler.update()"
                yield RULE.at(source, call, message, fix=fix)
        are_rare = bool(steps) and all(every_nth(program, step, loop) for step in steps)
        for call in of_scaler if are_rare else ():
            if is_method(call, "unscale_") and not every_nth(program, call, loop):
                message = (
                    f"{source.code(call)} runs for every micro-batch, scaler.step only "
                    "after several: the second call before a step raises a RuntimeError"
                )
                yield RULE.at(source, call, message, fix="unscale once, right before scaler.step")


def _is_of_scaler(program: Program, call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and is_scaler(program, call.func.value)
