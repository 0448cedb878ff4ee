"""`drumline find-lr TASK`: the command line of the range test (tools/find/range_test.py) that
suggests a learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from drumline.base.errors import UsageError
from drumline.cli.command_line import OUTPUT_FLAGS, read_command
from drumline.cli.train_command import CONFIG_FLAG, PROCS_FLAG, run_on_ranks, task_on_ranks
from drumline.config import FlagTable, FlagValues
from drumline.config.schema import Count, Positive

DEFAULTS = {"low": 1e-6, "high": 10.0, "steps": 100}
OWN_FLAGS: FlagTable = {
    "low": (Positive, "RATE", f"The rate of the first step [{DEFAULTS['low']:g}]."),
    "high": (
        Positive,
        "RATE",
        f"The rate of the last step, unless the loss diverges before [{DEFAULTS['high']:g}].",
    ),
    "steps": (
        Count,
        "N",
        f"Optimizer steps from the low rate to the high one [{DEFAULTS['steps']}].",
    ),
    **PROCS_FLAG,
    **CONFIG_FLAG,
    **OUTPUT_FLAGS,
}
USAGE = """\
usage: drumline find-lr TASK [--low RATE] [--high RATE] [--steps N] [--procs N] [--section.name value ...]

Trains TASK for some steps with a learning rate that grows from step to step, prints the loss at each rate, and
suggests --optim.lr: a tenth of the rate at which the loss is lowest, before it diverges. Every loss is that of the
whole global batch, so the suggestion does not depend on the number of ranks. The settings are those of `drumline train
TASK`. Nothing is saved.
"""


def run(argv: Sequence[str]) -> int:
    """All mistakes in the command are reported before torch is imported."""
    flags = read_command("find-lr", argv, {"": OWN_FLAGS}, USAGE, takes_settings=True)
    verb_flags = FlagValues({**DEFAULTS, **flags.values})
    if verb_flags.low >= verb_flags.high:
        raise UsageError(
            f"--low {verb_flags.low:g} is not below --high {verb_flags.high:g}",
            next_step="give a low rate and a high one",
        )
    task, layers = task_on_ranks(flags)

    def run_rank() -> int:
        from drumline.cli.as_rank import with_task
        from drumline.cli.find_rank import find_lr

        return with_task(task, layers, partial(find_lr, verb_flags))

    return run_on_ranks("find-lr", argv, flags, layers, run_rank)
