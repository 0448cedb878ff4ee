"""DL023: every rank begins a run of a tracker."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.guards import guards, is_on_every_rank
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.imports import connected
from drumline_lint.program.origins import depends_on_rank
from drumline_lint.program.program import Program
from drumline_lint.program.tree import nodes_in
from drumline_lint.reading.source import Source

RULE = rule("DL023", in_tests=False)
_TRACKERS = (
    "wandb.init mlflow.start_run neptune.init_run comet_ml.Experiment swanlab.init aim.Run".split()
)
_WRITERS = ("torch.utils.tensorboard.SummaryWriter", "tensorboardX.SummaryWriter")

_WRITING = set(
    "add_scalar add_scalars add_image add_images add_histogram add_figure add_text add_graph".split()
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls that begin a run, on every rank; not of a run or a group that is named by rank."""
    for call in program.calls(source, *_TRACKERS, *_WRITERS):
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        tests = [branch.test for value in arguments for branch in nodes_in(value, ast.IfExp)]
        is_grouped = argument(call, None, "group") is not None or has_unknown_arguments(call)
        if is_grouped or any(depends_on_rank(program, part) for part in (*arguments, *tests)):
            continue
        if is_on_every_rank(program, call):
            is_writer = program.name_of(call.func) in _WRITERS
            what = "is opened on every rank, with the same folder"
            what = what if is_writer else "begins a run on every rank"
            message = f"{source.code(call.func)} {what}"
            is_shown = is_of_ranks(program, source)
            is_shown = is_shown and not (is_writer and _writes_on_main_only(program, source))
            severity = None if is_shown else Severity.NOTE
            yield RULE.at(source, call, message, severity=severity)


def _writes_on_main_only(program: Program, source: Source) -> bool:
    """Whether all that is written to TensorBoard is under a condition on the rank: then the other
    ranks have files without content."""
    calls = [
        call
        for file in connected(program, source)
        if is_of_ranks(program, file)
        for name, named in program.index(file).calls.items()
        if name in _WRITING
        for call in named
    ]
    return bool(calls) and all(
        any(test.is_main and test.is_needed for test in guards(program, call)) for call in calls
    )
