"""DL023: every rank begins a run of a tracker.

The page of the tracker then shows as many runs as there are ranks. Runs that are named by rank, or
are of one group, are meant to be several.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.distributed import is_of_ranks
from drumline_lint.flow.guards import is_on_every_rank
from drumline_lint.flow.left_out import is_reached_in_every_run
from drumline_lint.program.calls import argument, has_unknown_arguments
from drumline_lint.program.origins import depends_on_rank
from drumline_lint.program.program import Program
from drumline_lint.program.tree import nodes_in, parent_of
from drumline_lint.reading.source import Source

RULE = rule("DL023", in_tests=False)
_TRACKERS = (
    "wandb.init mlflow.start_run neptune.init_run comet_ml.Experiment swanlab.init aim.Run".split()
)
_TURNING_OFF = ("WANDB_DISABLED", "WANDB_MODE")
_OFF = ("true", "1", "disabled")
_WRITERS = ("torch.utils.tensorboard.SummaryWriter", "tensorboardX.SummaryWriter")


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Calls that begin a run, on every rank: `wandb.init(project="mnist")`."""
    for call in program.calls(source, *_TRACKERS, *_WRITERS):
        if _is_named_by_rank(program, call) or not is_on_every_rank(program, call):
            continue

        function = source.code(call.func)
        is_writer = program.name_of(call.func) in _WRITERS
        if is_writer:
            message = f"{function} is opened on every rank, with the same folder"
        else:
            message = f"{function} begins a run on every rank"

        # writers that only rank 0 uses leave files without content
        is_shown = is_of_ranks(program, source) and not is_writer
        is_shown = is_shown and not _is_turned_off(program, source)
        severity = None if is_shown else Severity.NOTE
        yield RULE.at(source, call, message, severity=severity)


def _is_named_by_rank(program: Program, call: ast.Call) -> bool:
    """Whether the runs of the ranks differ, or are of one group.

    wandb.init(group="experiment-7", name=f"rank {rank}")
    wandb.init(mode="online" if rank == 0 else "disabled")
    """
    if argument(call, None, "group") is not None or has_unknown_arguments(call):
        return True

    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    tests = [branch.test for value in arguments for branch in nodes_in(value, ast.IfExp)]
    return any(depends_on_rank(program, part) for part in (*arguments, *tests))


def _is_turned_off(program: Program, source: Source) -> bool:
    """Whether every run that is shown comes to `os.environ["WANDB_MODE"] = "disabled"`."""
    return any(
        isinstance(setting.slice, ast.Constant)
        and setting.slice.value in _TURNING_OFF
        and isinstance(assignment := parent_of(setting), ast.Assign)
        and getattr(assignment.value, "value", None) in _OFF
        and is_reached_in_every_run(program, setting)
        for setting in program.index(source).every(ast.Subscript)
    )
