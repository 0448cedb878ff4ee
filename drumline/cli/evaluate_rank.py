"""One rank of `drumline evaluate`, and the opened checkpoint that `drumline predict` shares with
it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from drumline.base.terminal import show_lines
from drumline.base.text import duration, plural
from drumline.base.topology import topology_from
from drumline.cli.as_rank import RankWork, as_rank
from drumline.cli.command_line import show_json
from drumline.config.flags import Flags
from drumline.metrics.display import metric_text, metrics_of
from drumline.training.job.job import make_manager
from drumline.training.manager import RunManager
from drumline.training.saved.saved_run import SavedRun, evaluate_run, open_run


def run_rank(flags: Flags) -> int:
    """Evaluate as one rank of a group, or alone; returns the exit code."""

    def work(saved: SavedRun, ddp: RunManager) -> None:
        result = evaluate_run(saved, ddp, flags.values.get("data"))
        if ddp.is_main_process() and flags.values.get("json"):
            show_json(result)
        elif ddp.is_main_process():
            _print(result)

    return with_saved_run(flags, work)


def with_saved_run(flags: Flags, work: Callable[[SavedRun, RunManager], None]) -> int:
    """Open the checkpoint that the flags name, join the other ranks, and do the work; returns the
    exit code."""

    def prepare() -> RankWork:
        which = flags.values.get("which", "best")
        topology = topology_from(os.environ)
        saved = open_run(
            Path(flags.positional[0]),
            which,
            task=flags.values.get("task"),
            overrides=flags.layer,
            prints=topology is None or topology.rank == 0,
        )
        ddp = make_manager(saved.config, f"{saved.spec}, step {saved.step}")
        return RankWork(ddp, partial(work, saved, ddp))

    return as_rank(prepare)


def _print(result: dict[str, Any]) -> None:
    samples = plural(result["samples"], "sample")
    ranks = plural(result["world_size"], "rank")
    lines = [f"step {result['step']}: {samples} on {ranks} in {duration(result['seconds'])}"]
    lines += [
        f"  {name:<12} {metric_text(name, value)}"
        for name, value in metrics_of(result["metrics"]).items()
    ]
    show_lines(lines)
