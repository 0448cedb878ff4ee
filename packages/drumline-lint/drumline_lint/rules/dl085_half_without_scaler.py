"""DL085: gradients in float16 without a GradScaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.loops import batch_loops, calls_made_in
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Loop, parent_of
from drumline_lint.program.value import ConstantValue, Library
from drumline_lint.reading.source import Source

RULE = rule("DL085", only_distributed=False, in_tests=False)
_AUTOCAST = ("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast")
_HALF = {Library("torch.float16"), Library("torch.half")}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`autocast` in float16 around the forward pass of a loop that trains."""
    if "autocast" not in source.text or framework(program, source):
        return
    if any_text_near(program, source, "scaler", "Scaler", "loss_scale"):
        return
    for loop in batch_loops(program, source):
        yield from _in_loop(program, source, loop)


def _in_loop(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    for call in calls_made_in(program, loop):
        is_entered = isinstance(parent_of(call), ast.withitem)
        if is_entered and program.source_of(call) is source and _is_half(program, call):
            message = (
                f"{source.code(call)} computes in float16, and nothing scales the loss: "
                "small gradients become 0"
            )
            yield RULE.at(source, call, message)
            return


def _is_half(program: Program, call: ast.Call) -> bool:
    """Where that is certain: by its type, or by default on a GPU."""
    if program.name_of(call.func) not in _AUTOCAST:
        return False
    enabled = argument(call, None, "enabled")
    if enabled is not None and program.values(enabled) != {ConstantValue(True)}:
        return False
    kind = argument(call, 1, "dtype")
    if kind is not None:
        values = program.values(kind)
        return bool(values) and values <= _HALF
    device = program.values(argument(call, 0, "device_type"))
    return device == {ConstantValue("cuda")} or program.name_of(call.func).startswith("torch.cuda")
