"""DL070: a framework prepares the training, and a part of the loop goes around it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.loops import batch_loops, calls_made_in
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import ACCELERATOR, DEEPSPEED, FABRIC
from drumline_lint.program.origins import constants, depends_on_rank, parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Loop,
    called_name,
    dotted,
    enclosing_class,
    enclosing_function,
    is_after,
    last_name,
    nodes_in,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, loaders
from drumline_lint.training.steps import every_nth, is_method, steps_of_rounds

# Other data may be what this rank has made itself.
_STORED = ("datasets.load_", "torchvision.datasets.")
RULE = rule("DL070", only_distributed=False)
_SCHEDULE = re.compile(r"torch\.optim\.lr_scheduler\.|(?:transformers|diffusers)\..*schedule")
_SAVED_OTHERWISE = (
    "register_for_checkpointing",
    "register_save_state",
    "sched.state_dict",
    "schedule.state_dict",
    "scheduler.state_dict",
)
_COUNT = "gradient_accumulation_steps"
# Not of one micro-batch.
_ACCUMULATED = re.compile(r"""["']gradient_accumulation_steps["']\]?\s*[:=]\s*(?!1\b)\w""")
# What makes the model ready, and what must then be called instead of loss.backward().
_BACKWARD = {
    f"{ACCELERATOR}.prepare": "accelerator.backward(loss)",
    f"{FABRIC}.setup": "fabric.backward(loss)",
    DEEPSPEED: "engine.backward(loss)",
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`loss.backward()`, the engine's optimizer, and loaders and schedules that were not prepared
    as they must be, where all of it is in one function."""
    yield from _not_accumulated(program, source)
    for prepare in program.calls(source, *_BACKWARD):
        name = program.name_of(prepare.func)
        if "ccelerat" in name:
            yield from _short_schedules(program, source, prepare)
            yield from _unsaved_schedules(program, source, prepare)
        for loop in batch_loops(program, source):
            if _home(loop) is _home(prepare):
                yield from _in_loop(program, source, prepare, loop)


def _not_accumulated(program: Program, source: Source) -> Iterator[Finding]:
    """`Accelerator(gradient_accumulation_steps=8)`, and no `accelerator.accumulate(model)`."""
    for call in program.calls(source, ACCELERATOR):
        option = argument(call, None, "gradient_accumulation_steps")
        counts = constants(program, option) if option is not None else set()
        is_several = any(isinstance(count, int) and count > 1 for count in counts)
        is_used = any_text_near(program, source, ".accumulate(", "DeepSpeed", "deepspeed")
        loops = batch_loops(program, source) if is_several and not is_used else []
        steps = [step for loop in loops for step in steps_of_rounds(program, loop)]
        if steps and not any(is_rare for _, is_rare in steps):
            message = (
                "the losses are divided by gradient_accumulation_steps, and every batch is a step: "
                "nothing calls accumulate()"
            )
            fix = "put each step into `with accelerator.accumulate(model):`"
            yield RULE.at(source, call, message, fix=fix, severity=Severity.WARNING)


def _home(node: ast.AST) -> ast.AST | None:
    """The function that it is in, or the class of the method."""
    function = enclosing_function(node)
    return function if function is None else enclosing_class(function) or function


def _in_loop(program: Program, source: Source, prepare: ast.Call, loop: Loop) -> Iterator[Finding]:
    name = program.name_of(prepare.func)
    calls = [call for call in calls_made_in(program, loop) if program.source_of(call) is source]
    passes = [call for call in calls if is_method(call, "backward")]
    for call in passes if not any(call.args for call in passes) else ():
        message = (
            f"{source.code(call)} goes around the framework, "
            "which scales the loss and decides when gradients are averaged"
        )
        is_always = not any(conditions(program, prepare)) and not any(conditions(program, call))
        is_missed = name == DEEPSPEED or _has_own_backward(program, source)
        severity = Severity.WARNING if is_always and is_missed else None
        yield RULE.at(source, call, message, fix=f"call {_BACKWARD[name]}", severity=severity)
    targets = [dotted(target) for target in _targets(prepare)]
    steps = [call for call in calls if is_method(call, "step")]
    for call in steps if name == DEEPSPEED and targets[1:] else ():
        is_whole = any(call.args for call in passes) and all(call.args for call in passes)
        if dotted(call.func) == f"{targets[1]}.step" and is_whole:
            message = (
                f"{source.code(call)} goes around the engine, which counts micro-batches, "
                "clips, and steps the schedule"
            )
            yield RULE.at(source, call, message, fix="call engine.step()")
    is_accumulated = name == DEEPSPEED and _ACCUMULATED.search(source.text) is not None
    is_every = not any(every_nth(program, call, loop) for call in passes)
    for call in steps if is_accumulated and passes and is_every else ():
        if dotted(call.func) == f"{targets[0]}.step" and every_nth(program, call, loop):
            message = (
                f"{source.code(call)} comes after several micro-batches, and the engine counts its "
                "calls itself: it updates the weights far too seldom"
            )
            fix = "call engine.step() after every backward"
            is_one = _accumulated_counts(program, source) == {1}
            severity = Severity.NOTE if is_one else Severity.WARNING
            yield RULE.at(source, call, message, fix=fix, severity=severity)
    yield from _unknown_loaders(program, source, loop, name)


def _accumulated_counts(program: Program, source: Source) -> set[object]:
    """The numbers of micro-batches in the settings that are written in a file, and the defaults of
    their options."""
    return {
        count
        for settings in program.index(source).every(ast.Dict)
        for key, value in zip(settings.keys, settings.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == _COUNT
        for count in constants(program, value)
    }


def _unknown_loaders(program: Program, source: Source, loop: Loop, name: str) -> Iterator[Finding]:
    iterated = program.iterated(loop.iter) if isinstance(loop, ast.For) else None
    prepared = {ast.unparse(value) for call in _prepares(scope_of(loop)) for value in call.args}
    for call in loaders(program, iterated) if name != DEEPSPEED else ():
        names = {dotted(target) for target in _targets(call)}
        is_here = enclosing_function(call) is enclosing_function(loop)
        orders = [given(call, option) for option in ("sampler", "batch_sampler")]
        is_plain = orders == [None, None] and not depends_on_rank(program, given(call, "dataset"))
        if is_here and is_plain and not names & prepared:
            message = (
                "the framework does not know this loader: every rank trains on all of the data"
            )
            origins = [
                part
                for part in parts(program, given(call, "dataset"))
                if isinstance(part, ast.Call)
            ]
            is_stored = any(program.name_of(part.func).startswith(_STORED) for part in origins)
            severity = Severity.WARNING if is_stored else None
            fix = "pass the loader to the framework as well"
            yield RULE.at(source, call, message, fix=fix, severity=severity)


def _has_own_backward(program: Program, source: Source) -> bool:
    """Whether the framework scales the loss, or counts micro-batches: else its backward does what
    the loss's does."""
    for call in program.calls(source, ACCELERATOR, FABRIC):
        options = [argument(call, None, name) for name in ("mixed_precision", "precision")]
        constants = [value for option in options for value in program.values(option)]
        names = [value.value for value in constants if isinstance(value, ConstantValue)]
        if has_unknown_arguments(call) or "fp16" in names or "16-mixed" in names:
            return True
    return "gradient_accumulation" in source.text or ".accumulate(" in source.text


def _prepares(scope: ast.AST) -> list[ast.Call]:
    names = ("prepare", "prepare_data_loader", "setup_dataloaders", "_setup_dataloader")
    return [call for call in nodes_in(scope, ast.Call) if called_name(call) in names]


def _targets(call: ast.Call) -> list[ast.expr]:
    statement = statement_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [part for target in targets for part in getattr(target, "elts", [target])]


def _unsaved_schedules(program: Program, source: Source, prepare: ast.Call) -> Iterator[Finding]:
    """A schedule that was not prepared, in a run that continues from `accelerator.save_state`."""
    calls = nodes_in(scope_of(prepare), ast.Call)
    names = {called_name(call) for call in calls}
    prepared = {name for call in _prepares(scope_of(prepare)) for name in _names(call)}
    is_resumed = {"save_state", "load_state"} <= names
    is_known = not any(has_unknown_arguments(call) for call in _prepares(scope_of(prepare)))
    if not is_resumed or not is_known or any_text_near(program, source, *_SAVED_OTHERWISE):
        return
    stepped = [dotted(call.func) for call in calls if is_method(call, "step")]
    for schedule in calls:
        targets = {dotted(target) for target in _targets(schedule)}
        is_schedule = _SCHEDULE.match(program.name_of(schedule.func)) is not None
        # stepped twice, it may be brought to where the run continues
        is_stepped = any(stepped.count(f"{target}.step") == 1 for target in targets)
        is_placed = argument(schedule, None, "last_epoch") is not None
        if is_schedule and is_stepped and not is_placed and not targets & prepared:
            message = (
                "save_state and load_state do not know this schedule: a run that continues begins "
                "with its first learning rate"
            )
            fix = "pass it to accelerator.prepare, or to register_for_checkpointing"
            yield RULE.at(source, schedule, message, fix=fix, severity=Severity.WARNING)


def _names(call: ast.Call) -> set[str]:
    return {
        dotted(name) for value in call.args for name in nodes_in(value, ast.Name, ast.Attribute)
    }


def _short_schedules(program: Program, source: Source, prepare: ast.Call) -> Iterator[Finding]:
    """A schedule as long as a loader that was prepared before, which is prepared itself: Accelerate
    then steps it once for every rank."""
    prepares = [
        call
        for call in _prepares(scope_of(prepare))
        if is_after(prepare, call) and call is not prepare
    ]
    prepared = {dotted(target) for call in prepares for target in _targets(call)}
    for schedule in (part for value in prepare.args for part in parts(program, value)):
        if not (
            isinstance(schedule, ast.Call)
            and "sched" in called_name(schedule).lower()
            and program.source_of(schedule) is source
        ):
            continue
        every = list(parts(program, schedule))
        lengths = {
            dotted(part.args[0])
            for part in every
            if isinstance(part, ast.Call) and called_name(part) == "len" and part.args
        }
        words = {last_name(part) for part in every}
        if lengths & prepared and not words & {"num_processes", "split_batches", "world_size"}:
            message = (
                "the schedule counts the steps of one rank, and Accelerate steps it once for "
                "every rank: it ends far too early"
            )
            fix = "multiply the number of steps by accelerator.num_processes"
            severity = Severity.NOTE if _may_be_constant(schedule) else Severity.WARNING
            yield RULE.at(source, schedule, message, fix=fix, severity=severity)


def _may_be_constant(schedule: ast.Call) -> bool:
    """`get_scheduler(args.lr_scheduler, ...)`: a constant rate, which scripts often choose, has no
    end."""
    name = argument(schedule, 0, "name")
    return called_name(schedule) == "get_scheduler" and not isinstance(name, ast.Constant)
