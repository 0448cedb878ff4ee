"""One rank of `drumline evaluate`, and what the ranks of other verbs share with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from drumline.base.errors import ExitCode, summary
from drumline.base.startup import load_compiler_late
from drumline.base.terminal import print_message, show, show_lines
from drumline.base.text import duration, plural
from drumline.base.topology import topology_from
from drumline.cli.train_rank import exit_now
from drumline.config.flags import Flags
from drumline.metrics.display import metric_text, metrics_of
from drumline.runs.events import as_json as as_json_types
from drumline.training.failure_report import report_failure
from drumline.training.job.job import Progress, make_manager
from drumline.training.manager import DDPManager
from drumline.training.saved.saved_run import SavedRun, evaluate_run, open_run
from drumline.watch.failure_kind import failure_kind


def run_rank(flags: Flags) -> int:
    """Evaluate as one rank of a group, or alone; returns the exit code."""

    def work(saved: SavedRun, ddp: DDPManager) -> None:
        result = evaluate_run(saved, ddp, flags.own.get("data"))
        if ddp.is_main_process():
            _print(result, as_json=bool(flags.own.get("json")))

    return with_saved_run(flags, work)


def with_saved_run(flags: Flags, work: Callable[[SavedRun, DDPManager], None]) -> int:
    """Open the checkpoint that the flags name, join the other ranks, and do the work; returns the
    exit code."""

    def prepare() -> tuple[DDPManager, Callable[[], None]]:
        which = flags.own.get("which", "best")
        topology = topology_from(os.environ)
        saved = open_run(
            Path(flags.positional[0]),
            which,
            task=flags.own.get("task"),
            overrides=flags.layer,
            prints=topology is None or topology.rank == 0,
        )
        ddp = make_manager(saved.config, f"{saved.spec}, step {saved.step}")
        return ddp, partial(work, saved, ddp)

    return as_rank(prepare)


def as_rank(prepare: Callable[[], tuple[DDPManager, Callable[[], None]]]) -> int:
    """Prepare the manager and the work, join the other ranks, and do the work; returns the exit
    code."""
    ddp = DDPManager()
    try:
        ddp, work = prepare()
        ddp.setup()
        load_compiler_late()
        work()
    except KeyboardInterrupt as error:
        ddp._connection.heartbeat.fail(summary(error), failure_kind(error))
        if ddp._connection.store is None:  # among several ranks the launcher reports it, once
            print_message("interrupted")
        exit_now(ExitCode.INTERRUPTED)
    except (
        Exception,
        SystemExit,
    ) as error:  # the user's code may call sys.exit, which is not success
        ddp._connection.heartbeat.fail(summary(error), failure_kind(error))
        exit_now(report_failure(error, ddp, Progress(), run=None, environment=os.environ))
    if not ddp.cleanup():
        exit_now(ExitCode.SUCCESS)
    return ExitCode.SUCCESS


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        show(json.dumps(as_json_types(result)), is_data=True)
        return
    samples = plural(result["samples"], "sample")
    ranks = plural(result["world_size"], "rank")
    lines = [f"step {result['step']}: {samples} on {ranks} in {duration(result['seconds'])}"]
    lines += [
        f"  {name:<12} {metric_text(name, value)}"
        for name, value in metrics_of(result["metrics"]).items()
    ]
    show_lines(lines)
