"""`drumline evaluate RUN`: evaluates a checkpoint on any number of ranks, with the settings it was
trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drumline.cli.command_line import OUTPUT_FLAGS, check_command, check_run_is_named, read_command
from drumline.cli.ranks import run_on_ranks
from drumline.cli.train_command import PROCS_FLAG
from drumline.config import Flags, FlagTable
from drumline.launch.node_plan import Program
from drumline.runs.run_folder import find_run

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

    def run_rank() -> int:
        from drumline.cli import evaluate_rank

        return evaluate_rank.run_rank(flags)

    program = Program(("evaluate", *argv), is_task=True, can_resume=False)
    return run_on_ranks(program, flags.values, [flags.layer], run_rank)


def check_run_folder(verb: str, flags: Flags) -> None:
    """For a verb that opens a run, and takes settings."""
    check_command(verb, flags.layer.problems)
    check_run_is_named(verb, flags)
    find_run(Path(flags.positional[0]))
