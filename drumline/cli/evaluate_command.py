"""`drumline evaluate RUN`: evaluates a checkpoint on any number of ranks, with the settings it was
trained with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from drumline.base.errors import ConfigError, ExitCode, UsageError
from drumline.base.terminal import show
from drumline.cli.ranks import run_on_ranks
from drumline.config import FlagTable, read_flags
from drumline.config.flags import Flags
from drumline.config.help import render_flags
from drumline.config.schema import Count
from drumline.launch.node_plan import Program
from drumline.runs.run_folder import find_run
from drumline.storage.object_store import is_store_url

CHECKPOINT_FLAG: FlagTable = {
    "which": (str, "best | last | STEP", "The checkpoint [best, by the task's metric].")
}
RANK_FLAGS: FlagTable = {
    "procs": (
        Count,
        "N",
        "Ranks to start on this machine [one per GPU, or 1]; not under torchrun or srun.",
    ),
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
    "json": (bool, "", "Print one JSON object, for scripts."),
    "help": (bool, "", "Show this text."),
}
HELP = """\
usage: drumline evaluate RUN [--which best|last|STEP] [--data DATA] [--procs N] [--section.name value ...]

Evaluates a checkpoint of a run on the task's evaluation data, and prints the metrics: the same numbers as the run's
own evaluation, on any number of ranks. DATA is a folder or file that the task's evaluation data is read from (as
--data.dir), or a dataset of your own, path/to/file.py:Class. The settings are those of the checkpoint; flags override
them (--train.eval_batch_size, --dist.device, --task.NAME). It imports the task's code and writes nothing into RUN.
"""


def run(argv: Sequence[str]) -> int:
    flags = read_flags(argv, OWN_FLAGS, max_positional=1)
    if shows_help(flags, OWN_FLAGS, HELP):
        return ExitCode.SUCCESS
    check_run_flags("evaluate", flags)

    def load_rank() -> Callable[[], int]:
        from drumline.cli.evaluate_rank import run_rank

        return partial(run_rank, flags)

    program = Program(("evaluate", *argv), is_task=True, can_resume=False)
    return run_on_ranks(program, flags.own, [flags.layer], load_rank)


def shows_help(flags: Flags, own_flags: FlagTable, usage: str) -> bool:
    """Whether the help was asked for; then it is shown."""
    if not flags.own.get("help"):
        return False
    show("\n".join([usage, render_flags({"": own_flags})]), end="")
    return True


def check_run_flags(verb: str, flags: Flags) -> None:
    """Those of a verb that opens a run."""
    if flags.layer.problems:
        raise ConfigError(flags.layer.problems, next_step=f"read drumline {verb} --help")
    if not flags.positional:
        raise UsageError(
            "no RUN was given", next_step=f"give a run folder, as in: drumline {verb} runs/digits"
        )
    if not (verb == "export" and is_store_url(flags.positional[0])):
        find_run(Path(flags.positional[0]))
