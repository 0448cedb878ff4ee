"""`drumline find-batch TASK`: the search for the largest micro-batch
(tools/find/batch_search.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from drumline.cli.command_line import OUTPUT_FLAGS, read_command
from drumline.cli.train_command import CONFIG_FLAG, PROCS_FLAG, run_on_ranks, task_on_ranks
from drumline.config import FlagTable, FlagValues
from drumline.config.schema import Fraction

MARGIN = 0.05
OWN_FLAGS: FlagTable = {
    "margin": (
        Fraction,
        "FRACTION",
        f"How much of the GPU's memory a step must leave free, for fragmentation and longer samples [{MARGIN:g}].",
    ),
    **PROCS_FLAG,
    **CONFIG_FLAG,
    **OUTPUT_FLAGS,
}
USAGE = """\
usage: drumline find-batch TASK [--margin FRACTION] [--procs N] [--section.name value ...]

Finds the largest --train.micro_batch_size with which a step of TASK fits in the GPU's memory on every rank, by taking
steps on the task's own data, and prints how fast each size is. The global batch stays as it is, and so does the
result of the run. On the CPU only speed is measured. The settings are those of `drumline train TASK`. Nothing is
saved.
"""


def run(argv: Sequence[str]) -> int:
    """All mistakes in the command are reported before torch is imported."""
    flags = read_command("find-batch", argv, {"": OWN_FLAGS}, USAGE, takes_settings=True)
    task, layers = task_on_ranks(flags)

    def run_rank() -> int:
        from drumline.cli.as_rank import with_task
        from drumline.cli.find_rank import find_batch

        verb_flags = FlagValues({"margin": MARGIN, **flags.values})
        return with_task(task, layers, partial(find_batch, verb_flags))

    return run_on_ranks("find-batch", argv, flags, layers, run_rank)
