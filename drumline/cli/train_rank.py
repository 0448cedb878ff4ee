"""One rank of `drumline train`: imports torch, trains, and reports a failure if this rank was the first to fail."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drumline.cli.report_command import report_at_end
from drumline.config import Layers
from drumline.distributed.failure import summary
from drumline.engine.failure_report import report_failure
from drumline.engine.job import Progress, make_manager
from drumline.engine.local_data import with_local_data
from drumline.engine.output import start_clock
from drumline.engine.preemption import Preemption
from drumline.engine.run_context import RunRequest
from drumline.engine.train import train
from drumline.errors import ExitCode
from drumline.launch.startup import interrupted, load_compiler_late
from drumline.launch.topology import topology_from
from drumline.manager import DDPManager
from drumline.metrics.trackers.tracking import has_unfinished_tracker
from drumline.tasks.built_in import load_task, resolve_task
from drumline.terminal import print_message
from drumline.watch.failure_kind import failure_kind


def run_rank(task: str, layers: Layers, *, folder: Path, fresh: bool, argv: Sequence[str]) -> int:
    """Train as one rank of a group, or alone; returns the exit code."""
    ddp, progress, preemption = DDPManager(), Progress(), Preemption()
    topology = topology_from(os.environ)
    preemption.listen(prints=topology is None or topology.rank == 0)
    try:
        task_class = load_task(task)
        config = resolve_task(task, task_class, layers)
        clock = start_clock(os.environ, is_alone=topology is None)
        ddp = make_manager(config, task, run=folder)
        ddp.setup()
        load_compiler_late()
        clock.mark("rendezvous")
        if config.dist.mode == "auto":
            from drumline.engine.mode_choice import settle_mode  # few runs need it

            local = with_local_data(config, ddp)
            settled = settle_mode(local, task_class, ddp, lambda text: print_message(f"note: {text}"))
            config = replace(settled, data=config.data)
        preemption.join(ddp, progress)
        request = RunRequest(task, config, folder, fresh, tuple(argv))
        code = train(request, task_class, ddp, progress, preemption, clock)
    except KeyboardInterrupt as error:
        ddp._connection.heartbeat.fail(summary(error), failure_kind(error))
        if ddp._connection.store is None:  # among several ranks the launcher reports it, once
            print_message(interrupted(folder, argv))
        exit_now(ExitCode.INTERRUPTED)
    except (Exception, SystemExit) as error:  # the user's code may call sys.exit, which is not success
        ddp._connection.heartbeat.fail(summary(error), failure_kind(error))
        failed = report_failure(error, ddp, progress, run=folder, environment=os.environ)
        # Among several ranks the launcher does it, once none is restarted.
        if topology is None and failed == ExitCode.TRAINING_FAILED:
            report_at_end(folder)
        exit_now(failed)
    preemption.close()
    is_clean, is_main = ddp.cleanup(), topology is None or topology.rank == 0
    if is_main and config.log.profile is not None and code == ExitCode.SUCCESS:
        from drumline.cli.profile_report import report_profile

        report_profile(folder, shows=config.log.display != "none")
    if is_main:
        report_at_end(folder, prints=config.log.display != "none")
    if not is_clean or has_unfinished_tracker():
        exit_now(code)
    return code


def exit_now(code: int) -> None:
    """Without Python's own exit, which would wait for a process group that is broken or cannot be destroyed, and for a
    tracker that hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
