"""`drumline find-lr TASK`: the command line of the range test (engine/range_test.py) that suggests a learning rate."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.cli.find_settings import SHARED_FLAGS, run_verb
from drumline.config import FlagTable, read_flags
from drumline.config.schema import Count, Positive
from drumline.errors import UsageError

LOW, HIGH, STEPS = 1e-6, 10.0, 100
OWN_FLAGS: FlagTable = {
    "low": (Positive, "RATE", f"The rate of the first step [{LOW:g}]."),
    "high": (Positive, "RATE", f"The rate of the last step, unless the loss diverges before [{HIGH:g}]."),
    "steps": (Count, "N", f"Optimizer steps from the low rate to the high one [{STEPS}]."),
    **SHARED_FLAGS,
}
USAGE = """\
usage: drumline find-lr TASK [--low RATE] [--high RATE] [--steps N] [--procs N] [--section.name value ...]

Trains TASK for some steps with a learning rate that grows from step to step, prints the loss at each rate, and
suggests --optim.lr: a tenth of the rate at which the loss is lowest, before it diverges. Every loss is that of the
whole global batch, so the suggestion does not depend on the number of ranks. The settings are those of `drumline train
TASK`. Nothing is saved.
"""


def run(argv: Sequence[str]) -> int:
    flags = read_flags(argv, OWN_FLAGS, max_positional=1)
    low, high = flags.own.get("low", LOW), flags.own.get("high", HIGH)
    if low >= high:
        raise UsageError(f"--low {low:g} is not below --high {high:g}", next_step="give a low rate and a high one")
    return run_verb("find-lr", argv, flags, OWN_FLAGS, USAGE)
