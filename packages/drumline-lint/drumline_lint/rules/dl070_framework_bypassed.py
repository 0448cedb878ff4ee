"""DL070: a framework prepares the training, and a part of the loop goes around it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.loops import batch_loops, calls_made_in
from drumline_lint.program.names import ACCELERATOR, DEEPSPEED, FABRIC
from drumline_lint.program.origins import depends_on_rank
from drumline_lint.program.program import Program
from drumline_lint.program.tree import Loop, dotted, last_name
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, loaders
from drumline_lint.training.steps import is_method

RULE = rule("DL070")
# What makes the model ready, and what must then be called instead of loss.backward().
_BACKWARD = {
    f"{ACCELERATOR}.prepare": "accelerator.backward(loss)",
    f"{FABRIC}.setup": "fabric.backward(loss)",
    DEEPSPEED: "engine.backward(loss)",
}
_PREPARING = ("prepare", "prepare_data_loader", "setup_dataloaders", "_setup_dataloader")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`loss.backward()`, and loaders that were not prepared."""
    prepared = next(program.calls(source, *_BACKWARD), None)
    if prepared is None:
        return
    name = program.name_of(prepared.func)
    for loop in batch_loops(program, source):
        calls = [call for call in calls_made_in(program, loop) if is_method(call, "backward")]
        if not any(call.args for call in calls):
            yield from _bypassing(program, source, calls, _BACKWARD[name])
        if name != DEEPSPEED:
            yield from _unprepared(program, source, loop)


def _bypassing(
    program: Program, source: Source, calls: list[ast.Call], instead: str
) -> Iterator[Finding]:
    for call in calls:
        if program.source_of(call) is source:
            message = (
                f"{source.code(call)} goes around the framework, "
                "which scales the loss and decides when gradients are averaged"
            )
            yield RULE.at(source, call, message, fix=f"call {instead}")


def _unprepared(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    iterated = program.iterated(loop.iter) if isinstance(loop, ast.For) else None
    if iterated is None or dotted(iterated) in _prepared_names(program, source):
        return
    for call in loaders(program, iterated):
        orders = [given(call, name) for name in ("sampler", "batch_sampler")]
        is_divided = depends_on_rank(program, given(call, "dataset"))
        if program.source_of(call) is source and orders == [None, None] and not is_divided:
            message = (
                "the framework does not know this loader: every rank trains on all of the data"
            )
            yield RULE.at(source, call, message, fix="pass the loader to the framework as well")


def _prepared_names(program: Program, source: Source) -> set[str]:
    calls = [
        call
        for name in program.index(source).calls
        if name in _PREPARING
        for call in program.index(source).calls[name]
    ]
    return {dotted(value) for call in calls for value in call.args} | {
        last_name(value) for call in calls for value in call.args
    }
