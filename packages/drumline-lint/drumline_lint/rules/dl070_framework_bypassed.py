"""DL070: a framework prepares the training, and a part of the loop goes around it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import are_exclusive
from drumline_lint.flow.loops import batch_loops, calls_made_in
from drumline_lint.program.calls import argument
from drumline_lint.program.imports import calls_near
from drumline_lint.program.names import ACCELERATOR, DEEPSPEED, FABRIC, LOADER
from drumline_lint.program.origins import depends_on_rank, parts, written_values
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Loop,
    dotted,
    enclosing_class,
    enclosing_function,
    last_name,
    position,
    statement_of,
)
from drumline_lint.program.value import ConstantValue, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, loaders
from drumline_lint.training.steps import is_method

RULE = rule("DL070", only_distributed=False)
# What makes the model ready, and what must then be called instead of loss.backward().
_BACKWARD = {
    f"{ACCELERATOR}.prepare": "accelerator.backward(loss)",
    f"{FABRIC}.setup": "fabric.backward(loss)",
    DEEPSPEED: "engine.backward(loss)",
}
_PREPARING = ("prepare", "prepare_data_loader", "setup_dataloaders", "_setup_dataloader")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`loss.backward()`, and loaders that were not prepared."""
    yield from _short_schedules(program, source)
    yield from _same_batches(program, source)
    prepared = list(program.calls(source, *_BACKWARD))
    if not prepared:
        return
    name = program.name_of(prepared[0].func)
    for loop in batch_loops(program, source):
        if not any(_leads_to(program, call, loop) for call in prepared):
            continue  # another way to train
        calls = [call for call in calls_made_in(program, loop) if is_method(call, "backward")]
        if not any(call.args for call in calls):
            yield from _bypassing(program, source, calls, _BACKWARD[name])
        elif name == DEEPSPEED:
            yield from _stepped_by_optimizer(program, source, loop)
        if name != DEEPSPEED:
            yield from _unprepared(program, source, loop)


def _leads_to(program: Program, prepare: ast.Call, loop: Loop) -> bool:
    """Whether it is in the same function, in the same class, or in what calls the function."""
    home = enclosing_function(loop)
    place = enclosing_function(prepare)
    if home is None or place is None or home is place:
        return True
    owner = enclosing_class(home)
    callers = {enclosing_function(call) for call in program.callers(home)}
    return place in callers or (owner is not None and owner is enclosing_class(place))


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


def _stepped_by_optimizer(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """`optimizer.step()` of the optimizer that DeepSpeed returns."""
    engines = list(program.calls(source, DEEPSPEED))
    steps = [
        call
        for call in calls_made_in(program, loop)
        if is_method(call, "step")
        and not all(are_exclusive(program, engine, call) for engine in engines)
    ]
    targets = [
        target
        for call in engines
        if isinstance(statement := statement_of(call), ast.Assign)
        for target in statement.targets
    ]
    names = {
        dotted(target.elts[1])
        for target in targets
        if isinstance(target, ast.Tuple) and len(target.elts) > 1
    }
    for call in steps:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_returned = owner is not None and dotted(owner) in names - {"", "_"}
        if is_returned and program.source_of(call) is source:
            message = (
                f"{source.code(call)} goes around the engine, which counts micro-batches, "
                "clips, and steps the schedule"
            )
            yield RULE.at(source, call, message, fix="call engine.step()")


def _unprepared(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    iterated = program.iterated(loop.iter) if isinstance(loop, ast.For) else None
    if iterated is None or dotted(iterated) in _prepared_names(program, source):
        return
    for call in loaders(program, iterated):
        orders = [given(call, name) for name in ("sampler", "batch_sampler")]
        is_divided = depends_on_rank(program, given(call, "dataset"))
        is_here = program.source_of(call) is source and not _is_prepared_later(program, call)
        if is_here and orders == [None, None] and not is_divided:
            message = (
                "the framework does not know this loader: every rank trains on all of the data"
            )
            yield RULE.at(source, call, message, fix="pass the loader to the framework as well")


def _is_prepared_later(program: Program, loader: ast.Call) -> bool:
    """Whether it is made elsewhere, under a name that is prepared."""
    source = program.source_of(loader)
    names = {dotted(target) for target in _targets(loader)} & _prepared_names(program, source)
    return bool(names) and not any(
        enclosing_function(call) is enclosing_function(loader) and position(call) < position(loader)
        for call in program.calls(source, *_BACKWARD)
    )


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


def _short_schedules(program: Program, source: Source) -> Iterator[Finding]:
    """A schedule as long as a prepared loader, which is prepared itself: Accelerate then steps it
    once for every rank."""
    loaders_prepared = {
        dotted(target)
        for call in program.calls(source, f"{ACCELERATOR}.prepare")
        for target in _targets(call)
    }
    for call in program.calls(source, f"{ACCELERATOR}.prepare"):
        for schedule in (part for value in call.args for part in written_values(program, value)):
            is_schedule = (
                isinstance(schedule, ast.Call) and "sched" in last_name(schedule.func).lower()
            )
            if is_schedule and _is_counted_after(program, schedule, loaders_prepared):
                message = (
                    "the schedule counts the steps of one rank, and Accelerate steps it once for "
                    "every rank: it ends far too early"
                )
                fix = "multiply the number of steps by accelerator.num_processes"
                yield RULE.at(source, schedule, message, fix=fix)


def _targets(call: ast.Call) -> list[ast.expr]:
    statement = statement_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [part for target in targets for part in getattr(target, "elts", [target])]


def _is_counted_after(program: Program, schedule: ast.expr, prepared: set[str]) -> bool:
    every = list(parts(program, schedule))
    names = {last_name(part) for part in every}
    lengths = [
        part
        for part in every
        if isinstance(part, ast.Call) and last_name(part.func) == "len" and part.args
    ]
    are_after = any(
        dotted(length.args[0]) in prepared
        and position(length) < position(schedule)
        and _is_prepared_at(program, length.args[0])
        for length in lengths
    )
    return are_after and not names & {"num_processes", "split_batches", "world_size"}


def _is_prepared_at(program: Program, loader: ast.expr) -> bool:
    origins = written_values(program, loader)
    return bool(origins) and all(
        isinstance(origin, ast.Call) and program.name_of(origin.func) == f"{ACCELERATOR}.prepare"
        for origin in origins
    )


_SAMPLER_OPTIONS = ("use_distributed_sampler", "replace_sampler_ddp")


def _same_batches(program: Program, source: Source) -> Iterator[Finding]:
    """A Trainer that must not divide the data, and a loader whose sampler does not either."""
    for call in program.calls(source, "pytorch_lightning.Trainer"):
        options = [argument(call, None, name) for name in _SAMPLER_OPTIONS]
        is_off = any(program.values(option) == {ConstantValue(False)} for option in options)
        is_one = program.values(argument(call, None, "devices")) == {ConstantValue(1)}
        for loader in calls_near(program, source, LOADER) if is_off and not is_one else ():
            orders = [given(loader, name) for name in ("sampler", "batch_sampler")]
            classes = [
                value.of
                for order in orders
                for value in program.values(order)
                if isinstance(value, Instance)
            ]
            is_own = bool(classes) and not any(depends_on_rank(program, order) for order in orders)
            if is_own:
                message = (
                    f"{classes[0].name} knows nothing of ranks, and this Trainer does not divide "
                    "the data: all ranks train on the same batches"
                )
                yield RULE.at(
                    source, call, message, fix="divide the batches by rank in the sampler"
                )
                break
