"""DL061: a metric of one rank's part is taken for that of all samples.

An evaluation is a loop over one rank's part of the data that counts something. Nothing reports it
where a call in its function, its class or its callers joins the counts, also by its name alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import collectives_in
from drumline_lint.flow.distributed import framework, is_of_ranks
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.loops import batch_loops, evaluation_loops
from drumline_lint.program.calls import argument
from drumline_lint.program.names import ACCELERATOR
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Loop,
    called_name,
    calls_written,
    dotted,
    enclosing_class,
    enclosing_function,
    end_position,
    is_after,
    last_name,
    nodes_in,
    position,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import goes_over_part
from drumline_lint.training.models import has_devices

RULE = rule("DL061", only_distributed=False, in_tests=False)

_TRAINER = "pytorch_lightning.Trainer"
_LOG = "pytorch_lightning.LightningModule.log"
# The callbacks that look a metric up, and the number of the argument that names it.
_MONITORING = {"EarlyStopping": 0, "ModelCheckpoint": 2}
_GATHER = f"{ACCELERATOR}.gather"
_ALL_REDUCE = "torch.distributed.all_reduce"

# They bring together what was written to files before, and nothing else.
_WAITS = ("barrier", "wait_for_everyone")
_WRITING = ("dump", "open", "save", "savetxt", "savez", "to_csv", "to_json", "to_parquet", "write")
_ADDING = ("append", "extend", "add")
# What counts the samples that it is given: `metric.update(predictions)`.
_TAKING = (*_ADDING, "add_batch", "update")
# What reads a value and changes nothing.
_READING = ("float", "int", "item", "max", "min", "print", "round")

# What brings counts together, by its name: `reduce_mean`, `gather_object`, `MetricCollection.compute`.
_JOINING = re.compile(
    r"reduce(?!lr)|ranks|gather|broadcast|sync(?!_?b)|across|collect|merge|aggregat|^compute$"
    r"|average_over"
)

# `# only rank 0 reports`
_ONLY_FIRST = re.compile(
    r"#.*\bonly\b.*\b(rank 0|main process)|#.*\b(rank 0|main process)\b.*\bonly\b"
)

# What cuts off the samples that are there twice: `predictions[: len(dataset)]`.
_CUT = re.compile(
    r"\[ ?: ?[^\]]*(len\(|num_|total|seen|size)|samples_seen|remainder|gather_for_metrics"
)

# What divides or multiplies by the number of ranks.
_NUM_RANKS = re.compile(r"world|replicas|num_processes|n_?gpus|nprocs|AVG")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Evaluations over one rank's part of the data whose result nothing brings together, and sums
    of a part that are divided by the length of the whole.

    Where `val_loader` has a DistributedSampler:

        for images, labels in val_loader:
            correct += count_correct(model(images), labels)
        print(correct / len(val_dataset))
    """
    yield from _logged_by_lightning(program, source)
    if framework(program, source) not in ("", "accelerate", "lightning"):
        return

    evaluations = evaluation_loops(program, source)
    for loop in evaluations:
        yield from _gathered_twice(program, source, loop)
        yield from _divided_by_part(program, source, loop)
        if _is_left_apart(program, loop):
            message = (
                "every rank evaluates its own part of the data, and nothing reduces the result "
                "over ranks: what rank 0 reports is the metric of its part"
            )
            yield RULE.at(source, _result(loop), message, severity=_severity(program, loop))

    for loop in batch_loops(program, source):
        if loop not in evaluations and _is_left_apart(program, loop):
            yield from _divided_by_whole(source, loop, _severity(program, loop))


# Metrics of a framework


def _logged_by_lightning(program: Program, source: Source) -> Iterator[Finding]:
    """A value that a step of an evaluation logs, for a Trainer with several devices.

    For example:

        def validation_step(self, batch, index):
            loss = self.compute_loss(batch)
            self.log("val_loss", loss)
    """
    calls = list(program.calls(source, _LOG))
    trainers = list(program.all_calls(_TRAINER)) if calls else []
    if not any(has_devices(program, trainer) for trainer in trainers):
        return

    severity = Severity.WARNING if all(_divides(program, trainer) for trainer in trainers) else None
    for call in calls:
        if _logs_own_value(call):
            message = (
                f"{source.code(call.func)} keeps this rank's value: "
                "what is logged is the metric of rank 0's part of the data"
            )
            yield RULE.at(source, call, message, fix="add sync_dist=True", severity=severity)

        if _is_of_rank_zero(program, call) and _is_monitored(program, call):
            message = (
                f"{source.code(call.args[0])} exists on rank 0 only, and a callback monitors it: "
                "the other ranks do not find it"
            )
            fix = "leave rank_zero_only out"
            yield RULE.at(source, call, message, fix=fix, severity=Severity.WARNING)


def _is_of_rank_zero(program: Program, log: ast.Call) -> bool:
    """`self.log("val_auc", auc, rank_zero_only=True)`"""
    return program.values(argument(log, None, "rank_zero_only")) == {ConstantValue(True)}


def _is_monitored(program: Program, log: ast.Call) -> bool:
    """Whether every rank asks for the metric, as `EarlyStopping(monitor="val_auc")` does."""
    names = program.values(log.args[0]) if log.args else frozenset()
    for source in program.sources:
        for callback, number in _MONITORING.items():
            for call in program.index(source).calls.get(callback, ()):
                if names & program.values(argument(call, number, "monitor")):
                    return True

    return False


def _divides(program: Program, trainer: ast.Call) -> bool:
    """Whether a Trainer has several devices, and gives each its own part of the data.

    For example:

        Trainer(devices=4, strategy="ddp")
    """
    options = {keyword.arg for keyword in trainer.keywords}
    own_sampler = {"use_distributed_sampler", "replace_sampler_ddp", None}
    return has_devices(program, trainer) and not options & own_sampler


def _logs_own_value(log: ast.Call) -> bool:
    """Whether it logs a number in an evaluation, and no `sync_dist` may average it."""
    function = enclosing_function(log)
    if function is None or function.name not in ("validation_step", "test_step"):
        return False

    # a metric object is reduced by Lightning itself
    is_number = isinstance(argument(log, 1, "value"), ast.Name)

    options = {keyword.arg for keyword in log.keywords}
    return is_number and not options & {"sync_dist", None}


def _gathered_twice(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """Predictions that `gather` brings together: `prepare` repeats samples to fill the last batch.

    For example:

        for batch in val_loader:
            metric.add_batch(accelerator.gather(model(batch)))
    """
    gathers = [call for call in calls_written(loop) if program.name_of(call.func) == _GATHER]
    if not gathers or _is_cut_or_written(source, loop):
        return

    if _is_kept_by_number(loop, gathers) or not goes_over_part(program, loop):
        return

    for call in gathers:
        if "loss" in source.code(call):
            continue

        message = (
            f"{source.code(call.func)} keeps the samples that fill up the last batch: "
            "the metric counts them twice"
        )
        severity = Severity.WARNING if is_of_ranks(program, source) else None
        yield RULE.at(source, call, message, fix="call gather_for_metrics", severity=severity)


def _is_cut_or_written(source: Source, loop: Loop) -> bool:
    """Whether its function cuts off what is there twice, or writes to a file, which is no metric.

    For example:

        predictions = torch.cat(gathered)[: len(dataset)]
    """
    function = enclosing_function(loop)
    if function is None:
        return _CUT.search(source.text) is not None

    is_cut = _CUT.search(source.code(function)) is not None
    is_cut = is_cut or any(_cuts_behind(part, loop) for part in nodes_in(function, ast.Subscript))
    return is_cut or any(called_name(call) in _WRITING for call in nodes_in(function, ast.Call))


def _cuts_behind(part: ast.Subscript, loop: Loop) -> bool:
    """Whether it takes a number of the first items, which is not written out, after the loop.

    For example:

        spearman(torch.cat(predictions)[:num_rows])
    """
    if not isinstance(part.slice, ast.Slice) or not _is_behind(part, loop):
        return False

    last = part.slice.upper
    is_first_items = part.slice.lower is None and part.slice.step is None
    return is_first_items and last is not None and not isinstance(last, ast.Constant)


def _is_kept_by_number(loop: Loop, gathers: list[ast.Call]) -> bool:
    """Whether what is gathered is only written under its numbers: a sample that is there twice is
    written twice.

    For example:

        ids, values = accelerator.gather((batch["id"], outputs))
        rows[ids] = values
    """
    gathered: set[str] = set()
    is_keyed = False
    for statement in nodes_in(loop, ast.Assign, ast.For):
        if isinstance(statement, ast.Assign):
            value = statement.value
            targets = statement.targets
        else:
            value = statement.iter
            targets = [statement.target]

        keys = [target.slice for target in targets if isinstance(target, ast.Subscript)]
        if any(gathered & _written_in(key) for key in keys):
            is_keyed = True
        elif _is_made_of(value, gathered, gathers):
            gathered |= {name for target in targets for name in _names_bound(target)}

    return is_keyed and not any(_is_made_of(value, gathered, gathers) for value in _added(loop))


def _written_in(node: ast.AST) -> set[str]:
    """`{"batch", 'batch["ids"]'}` of the node `batch["ids"]`."""
    return {ast.unparse(part) for part in nodes_in(node, ast.Name, ast.Attribute, ast.Subscript)}


def _is_made_of(value: ast.AST, gathered: set[str], gathers: list[ast.Call]) -> bool:
    """Whether a value has one of these names in it, or one of these calls: `ids.tolist()` of
    `{"ids"}`."""
    is_named = not gathered.isdisjoint(_written_in(value))
    return is_named or any(call in gathers for call in nodes_in(value, ast.Call))


def _names_bound(target: ast.expr) -> list[str]:
    """`["i", "row"]` of `(i, row)`, and `['batch["ids"]']`."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for part in target.elts for name in _names_bound(part)]
    return [ast.unparse(target)]


def _added(loop: Loop) -> Iterator[ast.expr]:
    """What is added to a sum, or passed to what counts.

    It is `correct` here, twice:

        total += correct
        metric.update(correct)
    """
    for change in nodes_in(loop, ast.AugAssign):
        yield change.value

    for call in nodes_in(loop, ast.Call):
        if called_name(call) in _TAKING:
            yield from call.args
            yield from (keyword.value for keyword in call.keywords)


# Sums and counts that do not fit


def _divided_by_part(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """A sum that is reduced over ranks, divided by a count that is not.

    For example:

        for images, labels in val_loader:
            correct += count_correct(model(images), labels)
            total += len(labels)
        dist.all_reduce(correct)
        accuracy = correct / total
    """
    function = enclosing_function(loop)
    if function is None or _NUM_RANKS.search(source.code(function)):
        return

    calls = [call for call in nodes_in(function, ast.Call) if _is_behind(call, loop)]
    reductions = [call for call in calls if program.name_of(call.func) == _ALL_REDUCE]
    sums = {dotted(call.args[0]) for call in reductions if call.args} - {""}
    if not sums or not goes_over_part(program, loop):
        return

    changed = _changed_behind(function, loop, calls)
    counted = {dotted(part.target) for part in nodes_in(loop, ast.AugAssign)} - changed - sums
    for division in nodes_in(function, ast.BinOp):
        if not isinstance(division.op, ast.Div) or not _is_behind(division, loop):
            continue

        totals = sums & _names(division.left)
        parts = counted & _names(division.right)
        if totals and parts:
            message = (
                f"{min(totals)} is the sum of all ranks, and {min(parts)} counts this rank's part: "
                "the metric is too large by the number of ranks"
            )
            # every rank comes here, or the all_reduce would block
            severity = Severity.WARNING if is_of_ranks(program, source) else None
            yield RULE.at(source, division, message, fix="reduce both", severity=severity)


def _is_behind(node: ast.AST, loop: Loop) -> bool:
    """Whether it comes after the last line of the loop."""
    return position(node) > end_position(loop)


def _changed_behind(function: ast.AST, loop: Loop, calls: list[ast.Call]) -> set[str]:
    """The names that may have another value once the loop has ended, by one of the calls behind it,
    or by an assignment.

    For example:

        total = sum_over_ranks(total)
    """
    changes: list[ast.AST] = [call for call in calls if called_name(call) not in _READING]
    for assignment in nodes_in(function, ast.Assign, ast.AugAssign):
        if _is_behind(assignment, loop):
            is_plain = isinstance(assignment, ast.Assign)
            changes += assignment.targets if is_plain else [assignment.target]

    return {name for change in changes for name in _names(change)}


def _names(node: ast.AST) -> set[str]:
    """`self.correct`, `self` and `total` of `self.correct / total`."""
    return {dotted(name) for name in nodes_in(node, ast.Name, ast.Attribute)}


def _divided_by_whole(source: Source, loop: Loop, severity: Severity | None) -> Iterator[Finding]:
    """A sum over a part of the dataset, divided by the number of all samples.

    For example:

        for batch in loader:
            total += compute_loss(batch)
        print(total / len(dataset))
    """
    for division in nodes_in(scope_of(loop), ast.BinOp):
        if not is_after(division, loop) or not _is_by_length_of_dataset(division):
            continue

        if not _NUM_RANKS.search(source.code(statement_of(division))):
            message = (
                f"the sum of this rank's part is divided by {source.code(division.right)}, "
                "which counts the samples of all ranks"
            )
            yield RULE.at(source, division, message, severity=severity)


def _is_by_length_of_dataset(operation: ast.BinOp) -> bool:
    """`total / len(loader.dataset)`"""
    divisor = operation.right
    if not isinstance(operation.op, ast.Div) or not isinstance(divisor, ast.Call):
        return False

    is_length = called_name(divisor) == "len" and bool(divisor.args)
    return is_length and "dataset" in last_name(divisor.args[0]).lower()


# Loops whose result stays with the rank


def _is_left_apart(program: Program, loop: Loop) -> bool:
    """Whether it counts over a part of the data, and nothing joins the counts of the ranks."""
    return bool(_counting(loop)) and goes_over_part(program, loop) and not _is_joined(program, loop)


def _severity(program: Program, loop: Loop) -> Severity | None:
    """A warning where every rank is seen to come to the loop, in a program of ranks."""
    source = program.source_of(loop)
    is_sure = is_on_every_rank(program, loop) and is_of_ranks(program, source)
    return Severity.WARNING if is_sure and not _is_meant(source, loop) else None


def _is_meant(source: Source, loop: Loop) -> bool:
    """Whether a comment before the loop says that only the part of rank 0 counts.

    For example:

        # only the loss of rank 0 is logged
        for batch in loader:
    """
    before = source.lines[max(0, loop.lineno - 8) : loop.lineno]
    return any(_ONLY_FIRST.search(line.lower()) for line in before)


def _counting(loop: Loop) -> list[ast.expr]:
    """What is added up or collected in it, and not made anew in each round.

    It is `correct` and `losses` here:

        for batch in loader:
            correct += count_correct(batch)
            losses.append(compute_loss(batch))
    """
    made_inside = {dotted(target) for made in nodes_in(loop, ast.Assign) for target in made.targets}

    sums = [part.target for part in nodes_in(loop, ast.AugAssign)]
    collected = [
        call.func.value
        for call in nodes_in(loop, ast.Call)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDING
    ]

    return [place for place in (*sums, *collected) if dotted(place) not in made_inside]


def _result(loop: Loop) -> ast.AST:
    """Where the metric is made of what was counted; else where that is counted.

    For example:

        accuracy = correct / total
    """
    counting = _counting(loop)
    counted = {name.id for place in counting for name in nodes_in(place, ast.Name)}

    for name in nodes_in(scope_of(loop), ast.Name):
        if name.id in counted and _is_behind(name, loop):
            return statement_of(name)
    return statement_of(counting[0])


def _is_joined(program: Program, loop: Loop) -> bool:
    """Whether a call in the function, its class or its callers joins something, also by its name.

    For example:

        correct = reduce_mean(correct)
    """
    places = _places_around(program, loop)

    for place in places:
        calls = nodes_in(place, ast.Call, into_functions=True)
        if any(_JOINING.search(called_name(call).lower()) for call in calls):
            return True

    calls = nodes_in(places[0], ast.Call)
    is_through_file = any(called_name(call) in _WRITING for call in calls)
    collectives = (name for place in places for name, _ in collectives_in(program, place))
    return any(is_through_file or not name.endswith(_WAITS) for name in collectives)


def _places_around(program: Program, loop: Loop) -> list[ast.AST]:
    """The function that a loop is in, its class, and the functions that call it; outside of
    functions, the file."""
    function = enclosing_function(loop)
    if function is None:
        return [program.source_of(loop).tree]

    places: list[ast.AST] = [function]
    owner = enclosing_class(function)
    if owner is not None:
        places.append(owner)

    for call in program.callers(function):
        places.append(enclosing_function(call) or program.source_of(call).tree)

    return places
