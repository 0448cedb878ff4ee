"""One rank of a verb that does not train: it joins the other ranks, does its work, and reports a
failure if it was the first to fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from drumline.base.errors import ExitCode, summary
from drumline.base.startup import load_compiler_late
from drumline.base.terminal import print_message
from drumline.cli.train_rank import exit_now
from drumline.training.failure_report import report_failure
from drumline.training.job.job import Progress
from drumline.training.manager import DDPManager
from drumline.watch.failure_kind import failure_kind


class RankWork(NamedTuple):
    ddp: DDPManager
    """Not set up yet."""
    do: Callable[[], None]
    """What follows once all ranks have joined."""


def as_rank(prepare: Callable[[], RankWork]) -> int:
    """Prepare the work, join the other ranks, and do the work; returns the exit code."""
    ddp = DDPManager()
    try:
        ddp, do_work = prepare()
        ddp.setup()
        load_compiler_late()
        do_work()
    except KeyboardInterrupt as error:
        ddp.connection.heartbeat.fail(summary(error), failure_kind(error))
        if ddp.connection.store is None:  # among several ranks the launcher reports it, once
            print_message("interrupted")
        exit_now(ExitCode.INTERRUPTED)
    # The user's code may call sys.exit, which is not success.
    except (Exception, SystemExit) as error:
        ddp.connection.heartbeat.fail(summary(error), failure_kind(error))
        exit_now(report_failure(error, ddp, Progress(), run=None, environment=os.environ))
    if not ddp.cleanup():
        exit_now(ExitCode.SUCCESS)
    return ExitCode.SUCCESS
