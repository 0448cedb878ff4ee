"""What `find-lr` and `find-batch` share: the settings of `drumline train TASK`, and how their ranks are started."""

from __future__ import annotations

import os
from collections.abc import Sequence

from drumline.cli.evaluate_command import run_on_ranks
from drumline.cli.train_command import OWN_FLAGS as TRAIN_FLAGS
from drumline.cli.train_command import settle_before_torch
from drumline.config import Flags, FlagTable
from drumline.config.help import render_flags
from drumline.errors import ConfigError, ExitCode
from drumline.launch.topology import let_first_rank_report, topology_from
from drumline.terminal import show

SHARED_FLAGS: FlagTable = {
    "procs": TRAIN_FLAGS["procs"],
    "config": TRAIN_FLAGS["config"],
    "json": (bool, "", "Print one JSON object, for scripts."),
    "help": (bool, "", "Show this text."),
}


def run_verb(verb: str, argv: Sequence[str], flags: Flags, own_flags: FlagTable, usage: str) -> int:
    """All mistakes in the command are reported before torch is imported."""
    if flags.own.get("help"):
        show("\n".join([usage, render_flags({"": own_flags})]), end="")
        return ExitCode.SUCCESS
    task = flags.positional[0] if flags.positional else None
    topology = topology_from(os.environ)
    try:
        layers = settle_before_torch(task, flags)
    except ConfigError:
        let_first_rank_report(topology)
        raise
    assert task is not None
    return run_on_ranks([verb, *argv], "find_rank", verb, task, layers, flags.own, own=flags.own, layers=layers)
