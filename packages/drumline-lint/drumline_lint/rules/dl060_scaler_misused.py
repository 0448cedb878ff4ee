"""DL060: a GradScaler is only half used."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import always_exits, are_exclusive
from drumline_lint.flow.loops import batch_loops, calls_made_in
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Loop, block_of, position, scope_of, statement_of
from drumline_lint.reading.source import Source
from drumline_lint.training.steps import every_nth, is_method, is_optimizer, is_scaler

RULE = rule("DL060", only_distributed=False)
_METHODS = ("scale", "step", "unscale_", "update")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Scaled gradients that the optimizer applies itself, and `unscale_` at every micro-batch."""
    if "scale" not in source.text:
        return
    for loop in batch_loops(program, source):
        calls = [call for call in calls_made_in(program, loop) if is_method(call, *_METHODS)]
        of_scaler = [call for call in calls if _is_of(program, call, is_scaler)]
        steps = [call for call in of_scaler if is_method(call, "step")]
        if any(is_method(call, "scale") for call in of_scaler) and not steps:
            yield from _unscaled_steps(program, source, calls)
        yield from _repeated(program, source, loop, of_scaler, steps)
        yield from _updated_twice(program, source, of_scaler)


def _is_of(program: Program, call: ast.Call, is_kind: Callable[[Program, ast.expr], bool]) -> bool:
    return isinstance(call.func, ast.Attribute) and is_kind(program, call.func.value)


def _unscaled_steps(program: Program, source: Source, calls: list[ast.Call]) -> Iterator[Finding]:
    for call in calls:
        is_step = is_method(call, "step") and _is_of(program, call, is_optimizer)
        if is_step and program.source_of(call) is source:
            message = (
                f"{source.code(call)} applies gradients that are still scaled: "
                "the scaler neither unscales them nor skips an overflow"
            )
            yield RULE.at(
                source, call, message, fix="call scaler.step(optimizer) and scaler.update()"
            )


def _updated_twice(
    program: Program, source: Source, of_scaler: list[ast.Call]
) -> Iterator[Finding]:
    """One scaler for two optimizers, with an `update` after the step of each."""
    updates = [call for call in of_scaler if is_method(call, "update")]
    by_scaler = {ast.unparse(call.func): call for call in updates}
    for first in updates:
        last = by_scaler[ast.unparse(first.func)]
        is_one_round = scope_of(first) is scope_of(last) and position(first) < position(last)
        is_in_file = program.source_of(last) is source
        is_left = always_exits(program, block_of(statement_of(first)))
        if is_one_round and is_in_file and not is_left and not are_exclusive(program, first, last):
            message = (
                f"{source.code(last)} is the second in one step: "
                "the scale changes between the two optimizers"
            )
            # a loss that is scaled after the first update has the new scale
            is_rescaled = any(
                is_method(call, "scale") and position(first) < position(call) < position(last)
                for call in of_scaler
            )
            yield RULE.at(
                source,
                last,
                message,
                fix="call scaler.update() once, after the last scaler.step",
                severity=Severity.NOTE if is_rescaled else None,
            )
            return


def _repeated(
    program: Program, source: Source, loop: Loop, of_scaler: list[ast.Call], steps: list[ast.Call]
) -> Iterator[Finding]:
    """`unscale_` in every round, `step` only in some."""
    are_rare = bool(steps) and all(every_nth(program, step, loop) for step in steps)
    for call in of_scaler if are_rare else ():
        is_in_file = program.source_of(call) is source
        if is_method(call, "unscale_") and is_in_file and not every_nth(program, call, loop):
            message = (
                f"{source.code(call)} runs for every micro-batch, scaler.step only "
                "after several: the second call before a step raises a RuntimeError"
            )
            yield RULE.at(source, call, message, fix="unscale once, right before scaler.step")
