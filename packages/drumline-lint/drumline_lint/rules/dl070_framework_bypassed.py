"""DL070: a framework prepares the training, and a part of the loop goes around it.

The framework is accelerate, Fabric or DeepSpeed. What it prepares, and a loop over batches, are
looked at where both are in one function, or in methods of one class.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.loops import batch_loops, calls_made_in
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import any_text_near
from drumline_lint.program.names import ACCELERATOR, DEEPSPEED, DISTRIBUTED_SAMPLER, FABRIC
from drumline_lint.program.origins import constants, depends_on_rank, parts, written_values
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
    owner_of,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import ConstantValue, Instance
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import given, loaders
from drumline_lint.training.models import has_devices
from drumline_lint.training.steps import every_nth, is_method, steps_of_rounds

RULE = rule("DL070", only_distributed=False)

# Other data may be what this rank has made itself.
_STORED = ("datasets.load_", "torchvision.datasets.")
_SCHEDULE = re.compile(r"torch\.optim\.lr_scheduler\.|(?:transformers|diffusers)\..*schedule")
# Code that saves the state of a schedule itself.
_SAVED_OTHERWISE = (
    "register_for_checkpointing",
    "register_save_state",
    "sched.state_dict",
    "schedule.state_dict",
    "scheduler.state_dict",
)
_TRAINER = "pytorch_lightning.Trainer"
_LEAVING_SAMPLERS = ("use_distributed_sampler", "replace_sampler_ddp")
_OF_RANKS = re.compile(r"rank|world|replica|shard|process|\bdist\b|[Dd]istributed")
_COUNT = "gradient_accumulation_steps"
# Not of one micro-batch.
_ACCUMULATED = re.compile(r"""["']gradient_accumulation_steps["']\]?\s*[:=]\s*(?!1\b)\w""")

_STEPS_IN_JSON = re.compile(r'"gradient_accumulation_steps"\s*:\s*(\d+)')

_PREPARING = ("prepare", "prepare_data_loader", "setup_dataloaders", "_setup_dataloader")
# What makes the model ready, and what must then be called instead of loss.backward().
_BACKWARD = {
    f"{ACCELERATOR}.prepare": "accelerator.backward(loss)",
    f"{FABRIC}.setup": "fabric.backward(loss)",
    DEEPSPEED: "engine.backward(loss)",
}


def check(program: Program, source: Source) -> Iterator[Finding]:
    """`loss.backward()`, the engine's optimizer, and loaders and schedules that were not prepared
    as they must be, where all of it is in one function.

    For example:

        model, optimizer = accelerator.prepare(model, optimizer)
        for batch in loader:
            model(batch).loss.backward()
            optimizer.step()
    """
    yield from _not_accumulated(program, source)
    yield from _undivided_by_trainer(program, source)

    for prepare in program.calls(source, *_BACKWARD):
        name = program.name_of(prepare.func)
        if "ccelerat" in name:
            yield from _short_schedules(program, source, prepare)
            yield from _unsaved_schedules(program, source, prepare)
            yield from _divided_twice(program, source, prepare)

        for loop in batch_loops(program, source):
            if _home(loop) is _home(prepare):
                yield from _in_loop(program, source, prepare, loop)
                if name != DEEPSPEED:
                    yield from _unknown_loaders(program, source, loop)


def _home(node: ast.AST) -> ast.AST | None:
    """The function that it is in, or the class of the method."""
    function = enclosing_function(node)
    return function if function is None else enclosing_class(function) or function


def _not_accumulated(program: Program, source: Source) -> Iterator[Finding]:
    """Steps in every round of an Accelerator that divides the loss for several.

    For example:

        accelerator = Accelerator(gradient_accumulation_steps=8)
        for batch in loader:
            accelerator.backward(model(batch).loss)
            optimizer.step()
    """
    for call in program.calls(source, ACCELERATOR):
        option = argument(call, None, _COUNT)
        counts = constants(program, option) if option is not None else set()
        if not any(isinstance(count, int) and count > 1 for count in counts):
            continue
        if any_text_near(program, source, ".accumulate(", "DeepSpeed", "deepspeed"):
            continue

        loops = batch_loops(program, source)
        steps = [step for loop in loops for step in steps_of_rounds(program, loop)]
        if steps and not any(is_rare for _, is_rare in steps):
            message = (
                "the losses are divided by gradient_accumulation_steps, and every batch is a step: "
                "nothing calls accumulate()"
            )
            fix = "put each step into `with accelerator.accumulate(model):`"
            yield RULE.at(source, call, message, fix=fix, severity=Severity.WARNING)


# Backward passes and steps


def _in_loop(program: Program, source: Source, prepare: ast.Call, loop: Loop) -> Iterator[Finding]:
    """What the rounds of a loop call themselves, and the framework would do.

    For example:

        loss.backward()
    """
    name = program.name_of(prepare.func)
    calls = [call for call in calls_made_in(program, loop) if program.source_of(call) is source]
    passes = [call for call in calls if is_method(call, "backward")]

    if name == DEEPSPEED and passes:
        yield from _steps_of_engine(program, source, prepare, loop, calls)
    if any(call.args for call in passes):
        return

    for call in passes:
        message = (
            f"{source.code(call)} goes around the framework, "
            "which scales the loss and decides when gradients are averaged"
        )
        is_always = not any(conditions(program, prepare)) and not any(conditions(program, call))
        is_missed = name == DEEPSPEED or _has_own_backward(program, source)
        severity = Severity.WARNING if is_always and is_missed else None
        yield RULE.at(source, call, message, fix=f"call {_BACKWARD[name]}", severity=severity)


def _has_own_backward(program: Program, source: Source) -> bool:
    """Whether the framework scales the loss, or counts micro-batches: else its backward does what
    the loss's does.

    For example:

        accelerator = Accelerator(mixed_precision="fp16")
    """
    for call in program.calls(source, ACCELERATOR, FABRIC):
        options = [argument(call, None, name) for name in ("mixed_precision", "precision")]
        precisions = {value for option in options for value in program.values(option)}
        is_scaled = precisions & {ConstantValue("fp16"), ConstantValue("16-mixed")}
        if is_scaled or has_unknown_arguments(call):
            return True

    return "gradient_accumulation" in source.text or ".accumulate(" in source.text


def _steps_of_engine(
    program: Program, source: Source, prepare: ast.Call, loop: Loop, calls: list[ast.Call]
) -> Iterator[Finding]:
    """Steps of the optimizer that DeepSpeed has, and steps of an engine that accumulates itself,
    which are made in some rounds only.

    For example:

        engine, optimizer, _, _ = deepspeed.initialize(config=config, model=model)
        for index, batch in enumerate(loader):
            engine.backward(engine(batch))
            if (index + 1) % accumulation == 0:
                engine.step()
    """
    steps = [f"{dotted(target)}.step" for target in _targets(prepare)]
    passes = [call for call in calls if is_method(call, "backward")]
    is_of_engine = all(call.args for call in passes)
    is_every = not any(every_nth(program, call, loop) for call in passes)
    is_set = _ACCUMULATED.search(source.text) is not None or _is_set_by_launch(program, source)
    is_accumulated = is_every and is_set

    for call in calls:
        if is_of_engine and dotted(call.func) in steps[1:2]:
            message = (
                f"{source.code(call)} goes around the engine, which counts micro-batches, "
                "clips, and steps the schedule"
            )
            yield RULE.at(source, call, message, fix="call engine.step()")

        is_of_this = is_accumulated and dotted(call.func) in steps[:1]
        if is_of_this and every_nth(program, call, loop):
            message = (
                f"{source.code(call)} comes after several micro-batches, and the engine counts its "
                "calls itself: it updates the weights far too seldom"
            )
            fix = "call engine.step() after every backward"
            is_one = _accumulated_counts(program, source) == {1}
            severity = Severity.NOTE if is_one else Severity.WARNING
            yield RULE.at(source, call, message, fix=fix, severity=severity)


def _is_set_by_launch(program: Program, source: Source) -> bool:
    """Whether every launch that is shown names a JSON with `"gradient_accumulation_steps": 4`, or
    another number above 1."""
    configs = [launch.deepspeed_config for launch in program.starts_of(source)]
    counts = [_STEPS_IN_JSON.findall(config.text) if config else [] for config in configs]
    return bool(counts) and all(numbers and set(numbers) != {"1"} for numbers in counts)


def _accumulated_counts(program: Program, source: Source) -> set[object]:
    """The numbers of micro-batches in the settings that are written in a file, and the defaults of
    their options.

    They are 8 and 1 here:

        parser.add_argument("--accumulation", default=8)
        config = {"gradient_accumulation_steps": args.accumulation}
        config_for_tests = {"gradient_accumulation_steps": 1}
    """
    counts: set[object] = set()
    for settings in program.index(source).every(ast.Dict):
        for key, value in zip(settings.keys, settings.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == _COUNT:
                counts |= constants(program, value)

    return counts


# Loaders


def _unknown_loaders(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """A loader of the same function that the framework was not given, and that divides nothing
    itself.

    For example:

        loader = DataLoader(dataset, shuffle=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        for batch in loader:
            ...
    """
    iterated = program.iterated(loop.iter) if isinstance(loop, ast.For) else None
    prepared = {ast.unparse(value) for call in _prepares(scope_of(loop)) for value in call.args}

    for call in loaders(program, iterated):
        names = {dotted(target) for target in _targets(call)}
        is_here = enclosing_function(call) is enclosing_function(loop)
        if names & prepared or not is_here:
            continue

        dataset = given(call, "dataset")
        orders = [given(call, option) for option in ("sampler", "batch_sampler")]
        if orders == [None, None] and not depends_on_rank(program, dataset):
            message = (
                "the framework does not know this loader: every rank trains on all of the data"
            )
            fix = "pass the loader to the framework as well"
            makers = [part for part in parts(program, dataset) if isinstance(part, ast.Call)]
            is_stored = any(program.name_of(maker.func).startswith(_STORED) for maker in makers)
            severity = Severity.WARNING if is_stored else None
            yield RULE.at(source, call, message, fix=fix, severity=severity)


def _undivided_by_trainer(program: Program, source: Source) -> Iterator[Finding]:
    """A loader for a Trainer that is told to leave samplers as they are, with a sampler that knows
    nothing of ranks.

    For example:

        trainer = Trainer(devices=8, use_distributed_sampler=False)
        trainer.fit(model, DataLoader(dataset, batch_sampler=LengthBuckets(lengths)))
    """
    is_seeded = any_text_near(program, source, "seed_everything", "manual_seed")
    for loader in _fitted(program, source):
        if depends_on_rank(program, given(loader, "dataset")):
            continue

        for option in ("sampler", "batch_sampler"):
            sampler = given(loader, option)
            if sampler is not None and _is_alike_everywhere(program, sampler):
                message = (
                    f"the Trainer does not divide the data, and {source.code(sampler)} knows nothing "
                    "of ranks: every rank trains on all of it"
                )
                fix = (
                    "let the sampler yield the part of this rank, or leave samplers to the Trainer"
                )
                severity = Severity.WARNING if is_seeded else Severity.NOTE
                yield RULE.at(source, loader, message, fix=fix, severity=severity)


def _leaves_samplers(program: Program, trainer: ast.Call) -> bool:
    """`Trainer(devices=8, use_distributed_sampler=False)`, and the option's earlier name."""
    if not has_devices(program, trainer):
        return False

    options = [argument(trainer, None, name) for name in _LEAVING_SAMPLERS]
    return any(program.values(option) == {ConstantValue(False)} for option in options)


def _fitted(program: Program, source: Source) -> list[ast.Call]:
    """The loaders of a file that a Trainer trains with: what `fit` is given, and what
    `train_dataloader` returns."""
    every: list[ast.Call] = []
    for fit in program.all_calls(f"{_TRAINER}.fit"):
        trainers = [value.call for value in program.made(owner_of(fit), _TRAINER)]
        if trainers and all(_leaves_samplers(program, trainer) for trainer in trainers):
            every += loaders(program, argument(fit, 1, "train_dataloaders"))

    trainers = list(program.all_calls(_TRAINER))
    is_left = bool(trainers) and all(_leaves_samplers(program, trainer) for trainer in trainers)
    for function in program.index(source).every(ast.FunctionDef) if is_left else ():
        if function.name == "train_dataloader":
            for statement in nodes_in(function, ast.Return):
                every += loaders(program, statement.value)

    return [loader for loader in dict.fromkeys(every) if program.source_of(loader) is source]


def _is_alike_everywhere(program: Program, sampler: ast.expr) -> bool:
    """Whether it is of a class of the given files that does not mention ranks."""
    values = program.values(sampler)
    owners = [value.of for value in values if isinstance(value, Instance)]
    if not owners or len(owners) < len(values) or depends_on_rank(program, sampler):
        return False

    for owner in owners:
        places = [place for place in program.ancestry(owner) if isinstance(place, ast.ClassDef)]
        text = " ".join(program.source_of(place).code(place) for place in places)
        if _OF_RANKS.search(text):
            return False
    return True


def _divided_twice(program: Program, source: Source, prepare: ast.Call) -> Iterator[Finding]:
    """A loader with a DistributedSampler: `prepare` gives each rank a part of its batches, which are
    a part of the data already.

    For example:

        loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
        model, loader = accelerator.prepare(model, loader)
    """
    for value in prepare.args:
        calls = loaders(program, value)
        samplers = [written_values(program, given(call, "sampler")) for call in calls]
        if not calls or not all(_are_distributed(program, origins) for origins in samplers):
            continue

        message = (
            f"{source.code(value)} has a DistributedSampler, and prepare divides its batches between "
            "ranks once more: most samples are never read"
        )
        fix = "leave the DistributedSampler out"
        yield RULE.at(source, value, message, fix=fix, severity=Severity.WARNING)


def _are_distributed(program: Program, samplers: list[ast.expr]) -> bool:
    """Whether each of them is a DistributedSampler, and not one that a setting chooses."""
    names = [program.name_of(part.func) for part in samplers if isinstance(part, ast.Call)]
    return len(names) == len(samplers) > 0 and set(names) == {DISTRIBUTED_SAMPLER}


def _prepares(scope: ast.AST) -> list[ast.Call]:
    """`accelerator.prepare(...)` and `fabric.setup_dataloaders(...)`"""
    return [call for call in nodes_in(scope, ast.Call) if called_name(call) in _PREPARING]


def _targets(call: ast.Call) -> list[ast.expr]:
    """`engine` and `optimizer` of `engine, optimizer = deepspeed.initialize(...)`."""
    statement = statement_of(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [part for target in targets for part in getattr(target, "elts", [target])]


# Schedules


def _unsaved_schedules(program: Program, source: Source, prepare: ast.Call) -> Iterator[Finding]:
    """A schedule that was not prepared, in a run that continues from `accelerator.save_state`.

    For example:

        schedule = CosineAnnealingLR(optimizer, 100)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.load_state(folder)
        for batch in loader:
            schedule.step()
    """
    calls = nodes_in(scope_of(prepare), ast.Call)
    prepares = _prepares(scope_of(prepare))
    is_resumed = {"save_state", "load_state"} <= {called_name(call) for call in calls}

    if not is_resumed or any(map(has_unknown_arguments, prepares)):
        return
    if any_text_near(program, source, *_SAVED_OTHERWISE):
        return

    prepared = {name for call in prepares for name in _names(call)}
    stepped = [dotted(call.func) for call in calls if is_method(call, "step")]

    for schedule in calls:
        if not _SCHEDULE.match(program.name_of(schedule.func)):
            continue

        targets = {dotted(target) for target in _targets(schedule)}
        # stepped twice, it may be brought to where the run continues
        is_stepped = any(stepped.count(f"{target}.step") == 1 for target in targets)
        is_placed = argument(schedule, None, "last_epoch") is not None
        if is_stepped and not is_placed and not targets & prepared:
            message = (
                "save_state and load_state do not know this schedule: a run that continues begins "
                "with its first learning rate"
            )
            fix = "pass it to accelerator.prepare, or to register_for_checkpointing"
            yield RULE.at(source, schedule, message, fix=fix, severity=Severity.WARNING)


def _names(call: ast.Call) -> set[str]:
    """The names in the arguments of a call.

    `model`, `self` and `self.schedule` are those of:

        accelerator.prepare(model, self.schedule)
    """
    nodes = [node for value in call.args for node in nodes_in(value, ast.Name, ast.Attribute)]
    return {dotted(node) for node in nodes}


def _short_schedules(program: Program, source: Source, prepare: ast.Call) -> Iterator[Finding]:
    """A schedule as long as a loader that was prepared before, which is prepared itself: Accelerate
    then steps it once for every rank.

    For example:

        loader = accelerator.prepare(loader)
        schedule = get_linear_schedule(optimizer, num_steps=len(loader) * epochs)
        schedule = accelerator.prepare(schedule)
    """
    prepares = _prepares(scope_of(prepare))
    before = [call for call in prepares if call is not prepare and is_after(prepare, call)]
    prepared = {dotted(target) for call in before for target in _targets(call)}

    for schedule in (part for value in prepare.args for part in parts(program, value)):
        if not isinstance(schedule, ast.Call) or "sched" not in called_name(schedule).lower():
            continue
        if program.source_of(schedule) is not source:
            continue

        if _is_as_long_as(program, schedule, prepared):
            message = (
                "the schedule counts the steps of one rank, and Accelerate steps it once for "
                "every rank: it ends far too early"
            )
            fix = "multiply the number of steps by accelerator.num_processes"
            severity = Severity.NOTE if _may_be_constant(schedule) else Severity.WARNING
            yield RULE.at(source, schedule, message, fix=fix, severity=severity)


def _is_as_long_as(program: Program, schedule: ast.Call, prepared: set[str]) -> bool:
    """Whether its length is made of the `len` of a prepared loader, and not of the number of ranks.

    For example:

        get_scheduler("linear", optimizer, num_training_steps=len(loader) * epochs)
    """
    lengths = set()

    for part in parts(program, schedule):
        if last_name(part) in ("num_processes", "split_batches", "world_size"):
            return False
        if isinstance(part, ast.Call) and called_name(part) == "len" and part.args:
            lengths.add(dotted(part.args[0]))

    return not lengths.isdisjoint(prepared)


def _may_be_constant(schedule: ast.Call) -> bool:
    """Whether an option names the schedule: a constant rate, which scripts often choose, has no end.

    For example:

        get_scheduler(args.lr_scheduler, optimizer)
    """
    name = argument(schedule, 0, "name")
    return called_name(schedule) == "get_scheduler" and not isinstance(name, ast.Constant)
