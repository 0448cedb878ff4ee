"""One rank of `drumline train`: imports torch, trains, and reports a failure if this rank was the
first to fail."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, assert_never

from drumline.base.errors import ExitCode, PreflightError, UsageError, summary
from drumline.base.rank_environment import write_rank
from drumline.base.startup import interrupted, launch_start, load_compiler_late
from drumline.base.terminal import print_message
from drumline.base.topology import Topology, topology_from
from drumline.cli.report_command import report_at_end
from drumline.config import Layers
from drumline.config.schema import Config
from drumline.metrics.trackers.tracking import has_unfinished_tracker
from drumline.rank.rendezvous.live_nodes import LiveNodes
from drumline.rank.rendezvous.node_group import NodesChanged, Redirected, RunIsOver
from drumline.training.between_steps.preemption import Preemption
from drumline.training.failure_report import report_failure
from drumline.training.job.job import Progress, make_manager
from drumline.training.job.local_data import with_local_data
from drumline.training.kept_state import KeptState
from drumline.training.manager import DDPManager
from drumline.training.output import StartClock, start_clock
from drumline.training.run import train
from drumline.training.run_context import RunRequest
from drumline.training.tasks.built_in import load_task, resolve_task
from drumline.watch.failure_kind import FailureKind, failure_kind
from drumline.watch.heartbeat import Phase
from drumline.watch.run_status import RunStatusReader


def run_rank(task: str, layers: Layers, *, folder: Path, fresh: bool, argv: Sequence[str]) -> int:
    """Train as one rank of a group, or alone; returns the exit code."""
    ddp = DDPManager()
    progress = Progress()
    preemption = Preemption()
    topology = topology_from(os.environ)
    preemption.environment = os.environ
    preemption.listen(prints=topology is None or topology.rank == 0)
    try:
        task_class = load_task(task)
        config = resolve_task(task, task_class, layers)
        clock = start_clock(os.environ, is_alone=topology is None)
        live = live_nodes(topology, config, folder=folder)
        kept: KeptState | None = None
        while True:
            ddp = make_manager(config, task, run=folder)
            try:
                ddp.setup(live)
                load_compiler_late()
                clock.mark("rendezvous")
                if config.dist.mode == "auto":
                    from drumline.training.job.mode_choice import settle_mode  # few runs need it

                    local = with_local_data(config, ddp)
                    settled = settle_mode(
                        local, task_class, ddp, lambda text: print_message(f"note: {text}")
                    )
                    config = replace(settled, data=config.data)
                preemption.join(ddp, progress, may_leave=live is not None)
                starts_over = fresh and (live is None or live.latest.generation == 0)
                request = RunRequest(task, config, folder, starts_over, tuple(argv))
                code = train(request, task_class, ddp, progress, preemption, clock, live, kept)
                break
            except RunIsOver:
                assert live is not None
                leave_finished_run(live, ddp)
                exit_now(ExitCode.SUCCESS)
            except (NodesChanged, Redirected, PreflightError, RuntimeError) as change:
                if live is None or not live.continues_after(change, has_state=kept is not None):
                    raise
                kept = change.state if isinstance(change, NodesChanged) else kept
                preemption.is_between_groups = True
                if not enter_next_group(change, live, ddp):
                    exit_now(ExitCode.SUCCESS)
                write_rank(os.environ, live.topology().rank)
                clock = StartClock()
    except KeyboardInterrupt as error:
        ddp._connection.heartbeat.fail(summary(error), failure_kind(error))
        if ddp._connection.store is None:  # among several ranks the launcher reports it, once
            print_message(interrupted(folder, argv))
        exit_now(ExitCode.INTERRUPTED)
    except (
        Exception,
        SystemExit,
    ) as error:  # the user's code may call sys.exit, which is not success
        ddp._connection.heartbeat.fail(summary(error), failure_kind(error))
        failed = report_failure(error, ddp, progress, run=folder, environment=os.environ)
        # Among several ranks the launcher does it, once none is restarted.
        if topology is None and failed == ExitCode.TRAINING_FAILED:
            report_at_end(folder)
        exit_now(failed)
    preemption.close()
    if live is not None:
        live.close()
    is_main = ddp.is_main_process()
    is_clean = ddp.cleanup()
    if is_main and config.log.profile is not None and code == ExitCode.SUCCESS:
        from drumline.cli.profile_report import report_profile

        report_profile(folder, shows=config.log.display != "none")
    if is_main:
        report_at_end(folder, prints=config.log.display != "none")
    if (
        not is_clean
        or has_unfinished_tracker()
        or (live is not None and live.latest.generation > 0)
    ):
        exit_now(code)
    return code


def live_nodes(topology: Topology | None, config: Config, *, folder: Path) -> LiveNodes | None:
    """None: a lost node restarts all. `folder`: of the run."""
    match config.dist.on_lost_node:
        case "restart":
            return None
        case "continue":
            pass
        case _:
            assert_never(config.dist.on_lost_node)
    if topology is None or topology.world_size == topology.local_world_size:
        return None
    if topology.agent_hosts_store or (topology.local_world_size > 1 and not topology.node_start):
        raise UsageError(
            "--dist.on_lost_node continue needs ranks that drumline launch has started: other launchers restart all of "
            "them, or do not tell one start of a node's ranks from the next",
            next_step="start each node with drumline launch, or use --dist.on_lost_node restart",
        )
    return LiveNodes(
        topology,
        patience_s=config.dist.train_timeout_s,
        is_lost_peer=lambda error: failure_kind(error) is FailureKind.LOST_PEER,
        has_finished=partial(has_finished, folder, since=launch_start(os.environ)),
    )


def enter_next_group(change: BaseException, live: LiveNodes, ddp: DDPManager) -> bool:
    """Leave the group that broke or has to grow, or that never was, and agree on the next. False:
    the run has ended without this node."""
    ddp._connection.heartbeat.mark(Phase.LEFT)  # no failure, for the sidecar
    live.leave()
    ddp.cleanup(broken=True)
    if not isinstance(change, Redirected):
        live.regroup()
    elif not live.join(change):
        leave_finished_run(live, ddp)
        return False
    return True


def leave_finished_run(live: LiveNodes, ddp: DDPManager) -> None:
    ddp._connection.heartbeat.mark(Phase.LEFT)  # no failure, for the sidecar
    if live.is_first:
        print_message(f"node {live.number} did not join again: the run has ended")


def has_finished(folder: Path, *, since: float) -> bool:
    """Whether the run has reached its end after this time, in Unix seconds."""
    status = RunStatusReader(folder).read()
    return (
        status.state == "done"
        and status.last_event is not None
        and status.last_event["time"] > since
    )


def exit_now(code: int) -> NoReturn:
    """Without Python's own exit, which would wait for a process group that is broken or cannot be
    destroyed, and for a tracker that hangs. If a thread comes back from the store of a node that is
    stopped meanwhile, it would abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
