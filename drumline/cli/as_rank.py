"""How a rank ends, and one rank of a verb that does not train: it joins the other ranks, does its
work, and reports a failure if it was the first to fail."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from drumline.base.errors import ExitCode, summary
from drumline.base.text import print_message
from drumline.config import Layers
from drumline.config.schema import Config
from drumline.training.failure_report import report_failure
from drumline.training.job.job import Progress, make_manager
from drumline.training.manager import RunManager
from drumline.training.tasks.base import Task
from drumline.training.tasks.built_in import load_task, resolve_task
from drumline.watch.failure_kind import failure_kind


class RankWork(NamedTuple):
    ddp: RunManager
    """Not set up yet."""
    do: Callable[[], None]
    """What follows once all ranks have joined."""


def as_rank(prepare: Callable[[], RankWork]) -> int:
    """Prepare the work, join the other ranks, and do the work; returns the exit code."""
    ddp = RunManager()
    try:
        ddp, do_work = prepare()
        ddp.setup()
        do_work()
    except KeyboardInterrupt as error:
        exit_interrupted(error, ddp, "interrupted")
    # The user's code may call sys.exit, which is not success.
    except (Exception, SystemExit) as error:
        exit_now(failure_code(error, ddp, Progress(), run=None))

    if not ddp.cleanup():
        exit_now(ExitCode.SUCCESS)

    return ExitCode.SUCCESS


def with_task(
    task: str, layers: Layers, work: Callable[[Config, type[Task], RunManager], None]
) -> int:
    """Load the task and its settings, join the other ranks, and do the work; returns the exit
    code."""

    def prepare() -> RankWork:
        task_class = load_task(task)
        config = resolve_task(task, task_class, layers)
        ddp = make_manager(config, task)
        return RankWork(ddp, partial(work, config, task_class, ddp))

    return as_rank(prepare)


def exit_interrupted(error: KeyboardInterrupt, ddp: RunManager, message: str) -> NoReturn:
    ddp.connection.heartbeat.fail(summary(error), failure_kind(error))
    # among several ranks the launcher reports it, once
    if ddp.connection.store is None:
        print_message(message)
    exit_now(ExitCode.INTERRUPTED)


def failure_code(
    error: BaseException, ddp: RunManager, progress: Progress, *, run: Path | None
) -> int:
    """Report the error, and return the exit code."""
    ddp.connection.heartbeat.fail(summary(error), failure_kind(error))
    return report_failure(error, ddp, progress, run=run, environment=os.environ)


def exit_now(code: int) -> NoReturn:
    """Without Python's own exit, which would wait for a process group that is broken or cannot be
    destroyed, and for a tracker that hangs. If a thread comes back from the store of a node that is
    stopped meanwhile, it would abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
