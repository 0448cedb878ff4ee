"""`drumline evaluate RUN`: evaluates a checkpoint on any number of ranks, with the settings it was
trained with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.base.rank_environment import topology_from
from drumline.base.text import duration, plural, show_lines
from drumline.cli.command_line import (
    OUTPUT_FLAGS,
    check_command,
    check_run_is_named,
    read_command,
    show_json,
)
from drumline.cli.train_command import PROCS_FLAG, run_on_ranks
from drumline.config import Flags, FlagTable
from drumline.metrics.display import metric_text, metrics_of
from drumline.runs.run_folder import find_run

if TYPE_CHECKING:
    from drumline.training.manager import RunManager
    from drumline.training.saved.saved_run import SavedRun

CHECKPOINT_FLAG: FlagTable = {
    "which": (str, "best | last | STEP", "The checkpoint [best, by the task's metric].")
}
RANK_FLAGS: FlagTable = {
    **PROCS_FLAG,
    "task": (
        str,
        "TASK",
        "The task, where its file has moved since the run [as the run named it].",
    ),
}
OWN_FLAGS: FlagTable = {
    **CHECKPOINT_FLAG,
    "data": (
        str,
        "DATA",
        "Other data: a folder or file, or a dataset, path/to/file.py:Class [the task's own].",
    ),
    **RANK_FLAGS,
    **OUTPUT_FLAGS,
}
HELP = """\
usage: drumline evaluate RUN [--which best|last|STEP] [--data DATA] [--procs N] [--section.name value ...]

Evaluates a checkpoint of a run on the task's evaluation data, and prints the metrics: the same numbers as the run's
own evaluation, on any number of ranks. DATA is a folder or file that the task's evaluation data is read from (as
--data.dir), or a dataset of your own, path/to/file.py:Class. The settings are those of the checkpoint; flags override
them (--train.eval_batch_size, --dist.device, --task.NAME). It imports the task's code and writes nothing into RUN.
"""


def run(argv: Sequence[str]) -> int:
    flags = read_command("evaluate", argv, {"": OWN_FLAGS}, HELP, takes_settings=True)
    check_run_folder("evaluate", flags)
    return run_on_ranks("evaluate", argv, flags, [flags.layer], partial(_run_rank, flags))


def check_run_folder(verb: str, flags: Flags) -> None:
    """For a verb that opens a run, and takes settings."""
    check_command(verb, flags.layer.problems)
    check_run_is_named(verb, flags)
    find_run(Path(flags.positional[0]))


def _run_rank(flags: Flags) -> int:
    """Evaluate as one rank of a group, or alone; returns the exit code."""
    from drumline.training.saved.saved_run import evaluate_run

    def work(saved: SavedRun, ddp: RunManager) -> None:
        result = evaluate_run(saved, ddp, flags.values.data)
        if ddp.is_main_process() and flags.values.json:
            show_json(result)
        elif ddp.is_main_process():
            _print(result)

    return with_saved_run(flags, work)


def with_saved_run(flags: Flags, work: Callable[[SavedRun, RunManager], None]) -> int:
    """Open the checkpoint that the flags name, join the other ranks, and do the work; returns the
    exit code."""

    from drumline.cli.as_rank import RankWork, as_rank
    from drumline.training.job.job import make_manager
    from drumline.training.saved.saved_run import open_run

    def prepare() -> RankWork:
        """Open the checkpoint before the ranks join: a mistake needs no rendezvous."""
        which = flags.values.get("which", "best")
        topology = topology_from(os.environ)
        saved = open_run(
            Path(flags.positional[0]),
            which,
            task=flags.values.task,
            overrides=flags.layer,
            prints=topology is None or topology.rank == 0,
        )
        ddp = make_manager(saved.config, f"{saved.spec}, step {saved.step}")
        return RankWork(ddp, partial(work, saved, ddp))

    return as_rank(prepare)


def _print(result: dict[str, Any]) -> None:
    """The metrics as text."""
    samples = plural(result["samples"], "sample")
    ranks = plural(result["world_size"], "rank")
    lines = [f"step {result['step']}: {samples} on {ranks} in {duration(result['seconds'])}"]
    lines += [
        f"  {name:<12} {metric_text(name, value)}"
        for name, value in metrics_of(result["metrics"]).items()
    ]
    show_lines(lines)
