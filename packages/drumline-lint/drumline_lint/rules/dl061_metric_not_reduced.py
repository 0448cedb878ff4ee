"""DL061: a metric of one rank's part is taken for that of all samples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.collectives import collectives_in
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.loops import batch_loops, evaluation_loops
from drumline_lint.program.calls import argument
from drumline_lint.program.origins import parts
from drumline_lint.program.program import Program
from drumline_lint.program.tree import (
    Loop,
    dotted,
    enclosing_class,
    enclosing_function,
    end_position,
    last_name,
    nodes_in,
    position,
    scope_of,
    statement_of,
)
from drumline_lint.program.value import ConstantValue
from drumline_lint.reading.source import Source
from drumline_lint.training.loaders import goes_over_part

RULE = rule("DL061", only_distributed=False, in_tests=False)
_WORDS = ("rank", "Distributed", "accelerate", "lightning")
_REPORTS = {"print", "info", "log", "add_scalar", "write"}
_PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
_TRAINER = "pytorch_lightning.Trainer"
_LOG = "pytorch_lightning.LightningModule.log"
_EVALUATION_STEPS = ("validation_step", "test_step")
_ADDING = ("append", "extend", "add")
_JOINING = re.compile(
    r"reduce(?!lr)|gather|broadcast|sync|across|collect|merge|aggregat|^compute$|average_over"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Evaluations over one rank's part of the data whose result nothing brings together, and sums
    of a part that are divided by the length of the whole."""
    if not any(word in source.text for word in _WORDS):
        return
    yield from _logged_by_lightning(program, source)
    if framework(program, source) not in ("", "accelerate", "lightning"):
        return
    evaluations = evaluation_loops(program, source)
    for loop in evaluations:
        if _is_left_apart(program, loop) and _is_reported(program, loop):
            message = (
                "every rank evaluates its own part of the data, and nothing reduces the result "
                "over ranks: what rank 0 reports is the metric of its part"
            )
            yield RULE.at(source, _result(loop), message)
    yield from _own_plateaus(program, source)
    for loop in batch_loops(program, source):
        if loop not in evaluations and _is_left_apart(program, loop):
            yield from _divisions(source, loop)


def _own_plateaus(program: Program, source: Source) -> Iterator[Finding]:
    """`plateau.step(loss)` with the loss of this rank's part: the learning rates differ."""
    for call in program.calls(source, f"{_PLATEAU}.step"):
        metric = argument(call, 0, "metrics")
        for part in parts(program, metric):
            if isinstance(part, ast.Name) and _is_of_part(program, part):
                message = (
                    f"{source.code(call.func)} gets the metric of this rank's part of the data: "
                    "the ranks change their learning rates at different times"
                )
                yield RULE.at(source, call, message, severity=Severity.ERROR)
                break


def _is_of_part(program: Program, name: ast.Name) -> bool:
    """Whether a loop over this rank's part adds up under that name, and nothing joins it."""
    loops = [
        loop
        for loop in nodes_in(scope_of(name), ast.For)
        if name.id in _counted(loop) and position(name) > end_position(loop)
    ]
    return any(_is_left_apart(program, loop) for loop in loops)


def _logged_by_lightning(program: Program, source: Source) -> Iterator[Finding]:
    """`self.log("val_loss", loss)` in a step of an evaluation, for a Trainer with several devices."""
    if not any(_has_devices(program, call) for call in program.all_calls(_TRAINER)):
        return
    for call in program.calls(source, _LOG):
        function = enclosing_function(call)
        is_evaluation = function is not None and function.name in _EVALUATION_STEPS
        options = {keyword.arg for keyword in call.keywords}
        value = argument(call, 1, "value")
        # a metric object is reduced by Lightning itself
        is_number = isinstance(value, ast.Name) and not options & {"sync_dist", None}
        if is_evaluation and is_number:
            message = (
                f"{source.code(call.func)} keeps this rank's value: "
                "what is logged is the metric of rank 0's part of the data"
            )
            yield RULE.at(source, call, message, fix="add sync_dist=True")


def _has_devices(program: Program, trainer: ast.Call) -> bool:
    """Whether a Trainer is told to use several devices."""
    strategy = program.values(argument(trainer, None, "strategy"))
    texts = [str(value.value) for value in strategy if isinstance(value, ConstantValue)]
    devices = program.values(argument(trainer, None, "devices"))
    counts = [value.value for value in devices if isinstance(value, ConstantValue)]
    is_several = any(isinstance(count, int) and (count > 1 or count == -1) for count in counts)
    return is_several or any(text.startswith(("ddp", "fsdp", "deepspeed")) for text in texts)


def _is_left_apart(program: Program, loop: Loop) -> bool:
    return bool(_counting(loop)) and goes_over_part(program, loop) and not _is_joined(program, loop)


def _divisions(source: Source, loop: Loop) -> Iterator[Finding]:
    """`total / len(dataset)` after a loop over a part of the dataset."""
    for division in nodes_in(scope_of(loop), ast.BinOp):
        divisor = division.right if isinstance(division.op, ast.Div) else None
        is_length = isinstance(divisor, ast.Call) and last_name(divisor.func) == "len"
        measured = divisor.args[0] if isinstance(divisor, ast.Call) and divisor.args else None
        is_whole = measured is not None and "dataset" in last_name(measured).lower()
        if is_length and is_whole and position(division) > position(loop):
            message = (
                f"the sum of this rank's part is divided by {source.code(division.right)}, "
                "which counts the samples of all ranks"
            )
            yield RULE.at(source, division, message)


def _counting(loop: Loop) -> list[ast.AugAssign | ast.Call]:
    """Where something is added up or collected in it."""
    made_inside = {dotted(target) for made in nodes_in(loop, ast.Assign) for target in made.targets}
    sums = nodes_in(loop, ast.AugAssign)
    collected = [
        call
        for call in nodes_in(loop, ast.Call)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDING
    ]
    return [part for part in sums if dotted(part.target) not in made_inside] + [
        call for call in collected if dotted(call.func.value) not in made_inside
    ]


def _counted(loop: Loop) -> set[str]:
    """The names under which it adds up or collects."""
    places = [
        place.target if isinstance(place, ast.AugAssign) else place.func
        for place in _counting(loop)
    ]
    return {name.id for place in places for name in nodes_in(place, ast.Name)}


def _result(loop: Loop) -> ast.AST:
    """Where the metric is made of what was counted; else where that is counted."""
    counted = _counted(loop)
    after = [
        statement_of(name)
        for name in nodes_in(scope_of(loop), ast.Name)
        if name.id in counted and position(name) > end_position(loop)
    ]
    return after[0] if after else _counting(loop)[0]


def _is_reported(program: Program, loop: Loop) -> bool:
    """Whether it is known what becomes of the result: by its callers, or by what it prints."""
    function = enclosing_function(loop)
    if function is None or program.callers(function):
        return True
    names = {last_name(call.func).lower() for call in nodes_in(function, ast.Call)}
    return not names.isdisjoint(_REPORTS)


def _is_joined(program: Program, loop: Loop) -> bool:
    """Whether a name in the function, its class or its callers speaks of it."""
    function = enclosing_function(loop)
    places: list[ast.AST] = [program.source_of(loop).tree if function is None else function]
    if function is not None:
        owner = enclosing_class(function)
        places += [] if owner is None else [owner]
        callers = [enclosing_function(call) for call in program.callers(function)]
        places += [caller for caller in callers if caller is not None]
    if any(next(collectives_in(program, place), None) is not None for place in places):
        return True
    return any(
        _JOINING.search(last_name(call.func).lower())
        for place in places
        for call in nodes_in(place, ast.Call, into_functions=True)
    )
