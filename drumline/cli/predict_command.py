"""`drumline predict RUN [DATA]`: writes what a checkpoint predicts for every sample of a dataset,
in order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from drumline.base.errors import UsageError
from drumline.base.topology import topology_from
from drumline.cli.command_line import HELP_FLAG, check_new, read_command
from drumline.cli.evaluate_command import CHECKPOINT_FLAG, RANK_FLAGS, check_run_folder
from drumline.cli.ranks import run_on_ranks
from drumline.config import FlagTable
from drumline.launch.node_plan import Program

ENDINGS = (".jsonl", ".npy")
OWN_FLAGS: FlagTable = {
    "to": (str, "FILE", "The file to write: .jsonl, or .npy for one array [JSON lines on stdout]."),
    **CHECKPOINT_FLAG,
    **RANK_FLAGS,
    "force": (bool, "", "Replace FILE if it exists."),
    **HELP_FLAG,
}
HELP = """\
usage: drumline predict RUN [DATA] [--to FILE] [--which best|last|STEP] [--procs N] [--section.name value ...]

Writes what Task.predict returns for every sample of a dataset, in the order of the samples, the same on any number of
ranks. DATA is a folder or file that the task's evaluation data is read from (as --data.dir), or a dataset of your own,
path/to/file.py:Class; without it, the task's evaluation data. The weights are those that the run evaluates with. The
settings are those of the checkpoint; flags override them. It imports the task's code and writes nothing into RUN.
"""


def run(argv: Sequence[str]) -> int:
    flags = read_command(
        "predict", argv, {"": OWN_FLAGS}, HELP, max_positional=2, takes_settings=True
    )
    check_run_folder("predict", flags)
    if "to" in flags.values:
        to = Path(flags.values["to"])
        if to.suffix not in ENDINGS:
            raise UsageError(
                f"{to} ends neither in .jsonl nor in .npy", next_step=f"give --to {to.stem}.jsonl"
            )
        # A rank may see the file that rank 0 has begun to write.
        if topology_from(os.environ) is None:
            check_new(to, force=flags.values.get("force", False))

    def run_rank() -> int:
        from drumline.cli import predict_rank

        return predict_rank.run_rank(flags)

    program = Program(("predict", *argv), is_task=True, can_resume=False)
    return run_on_ranks(program, flags.values, [flags.layer], run_rank)
