"""`drumline evaluate RUN`: evaluates a checkpoint on any number of ranks, with the settings it was
trained with."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.base.errors import ConfigError, ExitCode, UsageError
from drumline.base.startup import INTERRUPTED_EARLY, default_procs, interruptible, loading
from drumline.base.terminal import show
from drumline.base.topology import topology_from
from drumline.config import FlagTable, read_flags
from drumline.config.flags import Flags, Layer
from drumline.config.help import render_flags
from drumline.config.schema import Count
from drumline.launch.node_plan import NodePlan, Program, Supervision
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
    if (
        flags := flags_for_run(
            "evaluate", read_flags(argv, OWN_FLAGS, max_positional=1), OWN_FLAGS, HELP
        )
    ) is None:
        return ExitCode.SUCCESS
    return run_on_ranks(
        ["evaluate", *argv], "evaluate_rank", flags, own=flags.own, layers=[flags.layer]
    )


def flags_for_run(verb: str, flags: Flags, own_flags: FlagTable, usage: str) -> Flags | None:
    """The flags of a verb that opens a run, checked; None: its help was asked for, and is shown."""
    if flags.own.get("help"):
        show("\n".join([usage, render_flags({"": own_flags})]), end="")
        return None
    if flags.layer.problems:
        raise ConfigError(flags.layer.problems, next_step=f"read drumline {verb} --help")
    if not flags.positional:
        raise UsageError(
            "no RUN was given", next_step=f"give a run folder, as in: drumline {verb} runs/digits"
        )
    if not (verb == "export" and is_store_url(flags.positional[0])):
        find_run(Path(flags.positional[0]))
    return flags


def run_on_ranks(
    words: Sequence[str],
    module: str,
    *arguments: Any,
    own: Mapping[str, Any],
    layers: Iterable[Layer],
) -> int:
    """Start the ranks of the command of these words, or be the one that this process is: `run_rank`
    of this module of `drumline.cli`, with these arguments. `own`: the flags of the verb; `layers`:
    the settings, flags first."""
    topology = topology_from(os.environ)
    with interruptible(INTERRUPTED_EARLY if topology is None else ""):
        devices = (
            layer.settings["dist.device"].value
            for layer in layers
            if "dist.device" in layer.settings
        )
        procs = own.get("procs") or (1 if next(devices, None) == "cpu" else default_procs())
        if topology is None and procs > 1:
            from drumline.launch.node.local import run_node

            program = Program(tuple(words), is_task=True, can_resume=False)
            return run_node(NodePlan(num_procs=procs), program, Supervision())
        with loading():
            rank = importlib.import_module(f"drumline.cli.{module}")
    code: int = rank.run_rank(*arguments)
    return code
