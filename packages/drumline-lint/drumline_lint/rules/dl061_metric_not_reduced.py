"""DL061: a metric of one rank's part is taken for that of all samples."""

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
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import goes_over_part
from drumline_lint.training.models import has_devices

RULE = rule("DL061", only_distributed=False, in_tests=False)
_TRAINER = "pytorch_lightning.Trainer"
_LOG = "pytorch_lightning.LightningModule.log"
# They bring together what was written to files before, and nothing else.
_WAITS = ("barrier", "wait_for_everyone")
_WRITING = ("dump", "open", "save", "savetxt", "savez", "to_csv", "to_json", "to_parquet", "write")
_ADDING = ("append", "extend", "add")
# What counts the samples that it is given.
_TAKING = (*_ADDING, "add_batch", "update")
_JOINING = re.compile(
    r"reduce(?!lr)|ranks|gather|broadcast|sync(?!_?b)|across|collect|merge|aggregat|^compute$"
    r"|average_over"
)

_ONLY_FIRST = re.compile(
    r"#.*\bonly\b.*\b(rank 0|main process)|#.*\b(rank 0|main process)\b.*\bonly\b"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Evaluations over one rank's part of the data whose result nothing brings together, and sums
    of a part that are divided by the length of the whole."""
    yield from _logged_by_lightning(program, source)
    if framework(program, source) not in ("", "accelerate", "lightning"):
        return
    evaluations = evaluation_loops(program, source)
    for loop in evaluations:
        yield from _gathered_twice(program, source, loop)
    for loop in evaluations:
        yield from _divided_by_part(program, source, loop)
        if _is_left_apart(program, loop):
            message = (
                "every rank evaluates its own part of the data, and nothing reduces the result "
                "over ranks: what rank 0 reports is the metric of its part"
            )
            yield RULE.at(source, _result(loop), message, severity=_severity(program, loop))
    for loop in batch_loops(program, source):
        if loop not in evaluations and _is_left_apart(program, loop):
            yield from _divisions(source, loop, _severity(program, loop))


_GATHER = f"{ACCELERATOR}.gather"
# What cuts off the samples that are there twice.
_CUT = re.compile(r"\[ ?: ?[^\]]*(len\(|num_|total|seen|size)|samples_seen|remainder")


def _gathered_twice(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """`accelerator.gather` of predictions: `prepare` repeats samples to fill the last batch."""
    calls = [call for call in calls_written(loop) if program.name_of(call.func) == _GATHER]
    function = enclosing_function(loop)
    code = source.code(function) if function is not None else source.text
    is_cut = _CUT.search(code) is not None or "gather_for_metrics" in code
    nearby = [] if function is None else nodes_in(function, ast.Call)
    is_written = any(called_name(call) in _WRITING for call in nearby)  # no metric
    is_metric = not is_written and not _is_kept_by_number(loop, calls)
    is_counted = not is_cut and is_metric and goes_over_part(program, loop)
    for call in calls if is_counted else ():
        if "loss" not in source.code(call):
            message = (
                f"{source.code(call.func)} keeps the samples that fill up the last batch: "
                "the metric counts them twice"
            )
            fix = "call gather_for_metrics"
            severity = Severity.WARNING if is_of_ranks(program, source) else None
            yield RULE.at(source, call, message, fix=fix, severity=severity)


def _is_kept_by_number(loop: Loop, gathers: list[ast.Call]) -> bool:
    """Whether what is gathered is only written under its numbers (`rows[ids] = values`): a sample
    that is there twice is written twice."""
    gathered: set[str] = set()
    is_keyed = False
    for statement in nodes_in(loop, ast.Assign, ast.For):
        is_assignment = isinstance(statement, ast.Assign)
        made = statement.value if is_assignment else statement.iter
        targets = statement.targets if is_assignment else [statement.target]
        keys = [target.slice for target in targets if isinstance(target, ast.Subscript)]
        if any(gathered & _written_in(key) for key in keys):
            is_keyed = True
        elif _is_made_of(made, gathered, gathers):
            gathered |= {name for target in targets for name in _names_bound(target)}
    changes = [change.value for change in nodes_in(loop, ast.AugAssign)]
    calls = [call for call in nodes_in(loop, ast.Call) if called_name(call) in _TAKING]
    uses = [*changes, *(value for call in calls for value in _arguments(call))]
    return is_keyed and not any(_is_made_of(use, gathered, gathers) for use in uses)


def _written_in(node: ast.AST) -> set[str]:
    return {ast.unparse(part) for part in nodes_in(node, ast.Name, ast.Attribute, ast.Subscript)}


def _is_made_of(value: ast.AST, gathered: set[str], gathers: list[ast.Call]) -> bool:
    is_named = not gathered.isdisjoint(_written_in(value))
    return is_named or any(call in gathers for call in nodes_in(value, ast.Call))


def _names_bound(target: ast.expr) -> list[str]:
    """`["i", "row"]` of `(i, row)`, and `['batch["ids"]']`."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for part in target.elts for name in _names_bound(part)]
    return [ast.unparse(target)]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


_ALL_REDUCE = "torch.distributed.all_reduce"
_READING = ("float", "int", "item", "max", "min", "print", "round")
_NUM_RANKS = re.compile(r"world|replicas|num_processes|n_?gpus|nprocs|AVG")


def _divided_by_part(program: Program, source: Source, loop: Loop) -> Iterator[Finding]:
    """`correct / total` after `dist.all_reduce(correct)`, and nothing for the total."""
    function = enclosing_function(loop)
    if function is None or _NUM_RANKS.search(source.code(function)):
        return
    calls = [call for call in nodes_in(function, ast.Call) if _is_behind(call, loop)]
    reductions = [call for call in calls if program.name_of(call.func) == _ALL_REDUCE]
    sums = {dotted(call.args[0]) for call in reductions if call.args} - {""}
    if not sums or not goes_over_part(program, loop):
        return
    changes: list[ast.AST] = [call for call in calls if called_name(call) not in _READING]
    for assignment in nodes_in(function, ast.Assign, ast.AugAssign):
        changes += _targets(assignment) if _is_behind(assignment, loop) else []
    changed = {name for change in changes for name in _names(change)}
    counted = {dotted(part.target) for part in nodes_in(loop, ast.AugAssign)} - changed - sums
    for division in nodes_in(function, ast.BinOp):
        is_quotient = isinstance(division.op, ast.Div) and _is_behind(division, loop)
        totals = sums & _names(division.left)
        parts = counted & _names(division.right)
        if is_quotient and totals and parts:
            message = (
                f"{min(totals)} is the sum of all ranks, and {min(parts)} counts this rank's part: "
                "the metric is too large by the number of ranks"
            )
            # every rank comes here, or the all_reduce would block
            severity = Severity.WARNING if is_of_ranks(program, source) else None
            yield RULE.at(source, division, message, fix="reduce both", severity=severity)


def _is_behind(node: ast.AST, loop: Loop) -> bool:
    return position(node) > end_position(loop)


def _targets(assignment: ast.Assign | ast.AugAssign) -> list[ast.expr]:
    return assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]


def _names(node: ast.AST) -> set[str]:
    return {dotted(name) for name in nodes_in(node, ast.Name, ast.Attribute)}


def _logged_by_lightning(program: Program, source: Source) -> Iterator[Finding]:
    """`self.log("val_loss", loss)` in a step of an evaluation, for a Trainer with several devices."""
    calls = list(program.calls(source, _LOG))
    trainers = list(program.all_calls(_TRAINER)) if calls else []
    if not any(has_devices(program, trainer) for trainer in trainers):
        return
    severity = Severity.WARNING if all(_divides(program, trainer) for trainer in trainers) else None
    for call in calls:
        function = enclosing_function(call)
        is_evaluation = function is not None and function.name in ("validation_step", "test_step")
        options = {keyword.arg for keyword in call.keywords}
        # a metric object is reduced by Lightning itself
        is_number = isinstance(argument(call, 1, "value"), ast.Name)
        if is_evaluation and is_number and not options & {"sync_dist", None}:
            message = (
                f"{source.code(call.func)} keeps this rank's value: "
                "what is logged is the metric of rank 0's part of the data"
            )
            yield RULE.at(source, call, message, fix="add sync_dist=True", severity=severity)


def _divides(program: Program, trainer: ast.Call) -> bool:
    """Whether it has several devices, and gives each its own part of the data."""
    options = {keyword.arg for keyword in trainer.keywords}
    own_sampler = {"use_distributed_sampler", "replace_sampler_ddp", None}
    return has_devices(program, trainer) and not options & own_sampler


def _is_left_apart(program: Program, loop: Loop) -> bool:
    return bool(_counting(loop)) and goes_over_part(program, loop) and not _is_joined(program, loop)


def _severity(program: Program, loop: Loop) -> Severity | None:
    """A warning where every rank is seen to come to the loop, in a program of ranks."""
    source = program.source_of(loop)
    is_sure = is_on_every_rank(program, loop) and is_of_ranks(program, source)
    return Severity.WARNING if is_sure and not _is_meant(source, loop) else None


def _is_meant(source: Source, loop: Loop) -> bool:
    """Whether a comment before the loop says that only the part of rank 0 counts."""
    before = source.lines[max(0, loop.lineno - 8) : loop.lineno]
    return any(_ONLY_FIRST.search(line.lower()) for line in before)


def _divisions(source: Source, loop: Loop, severity: Severity | None) -> Iterator[Finding]:
    """`total / len(dataset)` after a loop over a part of the dataset."""
    for division in nodes_in(scope_of(loop), ast.BinOp):
        divisor = division.right if isinstance(division.op, ast.Div) else None
        is_length = isinstance(divisor, ast.Call) and called_name(divisor) == "len"
        measured = divisor.args[0] if isinstance(divisor, ast.Call) and divisor.args else None
        is_whole = measured is not None and "dataset" in last_name(measured).lower()
        is_scaled = _NUM_RANKS.search(source.code(statement_of(division))) is not None
        if is_length and is_whole and is_after(division, loop) and not is_scaled:
            message = (
                f"the sum of this rank's part is divided by {source.code(division.right)}, "
                "which counts the samples of all ranks"
            )
            yield RULE.at(source, division, message, severity=severity)


def _counting(loop: Loop) -> list[ast.expr]:
    """What is added up or collected in it, and not made anew in each round."""
    made_inside = {dotted(target) for made in nodes_in(loop, ast.Assign) for target in made.targets}
    sums = [part.target for part in nodes_in(loop, ast.AugAssign)]
    collected = [
        call.func.value
        for call in nodes_in(loop, ast.Call)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDING
    ]
    return [place for place in (*sums, *collected) if dotted(place) not in made_inside]


def _counted(loop: Loop) -> set[str]:
    """The names under which it adds up or collects."""
    return {name.id for place in _counting(loop) for name in nodes_in(place, ast.Name)}


def _result(loop: Loop) -> ast.AST:
    """Where the metric is made of what was counted; else where that is counted."""
    counted = _counted(loop)
    after = [
        statement_of(name)
        for name in nodes_in(scope_of(loop), ast.Name)
        if name.id in counted and position(name) > end_position(loop)
    ]
    return after[0] if after else statement_of(_counting(loop)[0])


def _is_joined(program: Program, loop: Loop) -> bool:
    """Whether a call in the function, its class or its callers joins something, also by its name."""
    function = enclosing_function(loop)
    places: list[ast.AST] = [program.source_of(loop).tree if function is None else function]
    if function is not None:
        owner = enclosing_class(function)
        places += [] if owner is None else [owner]
        places += [
            enclosing_function(call) or program.source_of(call).tree
            for call in program.callers(function)
        ]
    calls = nodes_in(places[0], ast.Call)
    is_through_file = any(called_name(call) in _WRITING for call in calls)
    return any(
        _JOINING.search(called_name(call).lower()) is not None
        for place in places
        for call in nodes_in(place, ast.Call, into_functions=True)
    ) or any(
        is_through_file or not name.endswith(_WAITS)
        for place in places
        for name, _ in collectives_in(program, place)
    )
