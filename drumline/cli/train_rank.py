"""One rank of `drumline train`: imports torch, trains, and reports a failure if this rank was the
first to fail."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, assert_never

from drumline.base.errors import ExitCode, PreflightError, UsageError
from drumline.base.rank_environment import Topology, topology_from, write_rank
from drumline.base.startup import interrupted, launch_start
from drumline.base.text import print_message
from drumline.cli.as_rank import exit_interrupted, exit_now, failure_code
from drumline.config import Layers
from drumline.config.schema import Config
from drumline.metrics.trackers.tracking import has_unfinished_tracker
from drumline.rank.rendezvous.live_nodes import LiveNodes
from drumline.rank.rendezvous.node_group import NodesChanged, Redirected, RunIsOver
from drumline.training.between_steps.preemption import Preemption
from drumline.training.job.evaluation_job import with_local_data
from drumline.training.job.job import Progress, make_manager
from drumline.training.manager import RunManager
from drumline.training.output import StartClock, start_clock
from drumline.training.run import Regrouping, TrainingRun
from drumline.training.run_context import RunRequest
from drumline.training.tasks.base import Task
from drumline.training.tasks.built_in import load_task, resolve_task
from drumline.watch.failure_kind import FailureKind, failure_kind
from drumline.watch.heartbeat import Phase
from drumline.watch.run_status import RunStatusReader


def run_rank(task: str, layers: Layers, *, folder: Path, fresh: bool, argv: Sequence[str]) -> int:
    """Train as one rank of a group, or alone; returns the exit code."""
    process = TrainingProcess(task, folder=folder, fresh=fresh, argv=argv)
    try:
        process.load(layers)
        code = process.train_in_groups()
    except KeyboardInterrupt as error:
        exit_interrupted(error, process.ddp, interrupted(folder, argv))
    except (Exception, SystemExit) as error:
        # sys.exit in the user's code is not success
        process.end_failed(error)
    return process.leave(code)


class TrainingProcess:
    """This process as a rank of a run: it loads the task, joins a group of nodes and trains in it,
    joins the next one where a node is lost, and leaves."""

    task_class: type[Task]
    config: Config
    clock: StartClock
    regrouping: Regrouping

    def __init__(self, task: str, *, folder: Path, fresh: bool, argv: Sequence[str]) -> None:
        self.task = task
        self.folder = folder
        self.fresh = fresh
        self.argv = argv
        self.ddp = RunManager()
        self.progress = Progress()
        self.topology = topology_from(os.environ)
        self.preemption = Preemption(os.environ)
        self.preemption.listen(prints=self.topology is None or self.topology.rank == 0)

    def load(self, layers: Layers) -> None:
        """The task, which is the user's code, and its settings."""
        self.task_class = load_task(self.task)
        self.config = resolve_task(self.task, self.task_class, layers)
        self.clock = start_clock(os.environ, is_alone=self.topology is None)
        self.regrouping = Regrouping(live_nodes(self.topology, self.config, folder=self.folder))

    def train_in_groups(self) -> ExitCode:
        """Until the run ends; the next group of nodes is another run of the same phases."""
        while True:
            self.ddp = make_manager(self.config, self.task, run=self.folder)
            try:
                self._join_group()
                return self._train()
            except RunIsOver:
                self._leave_finished_run()
            except (NodesChanged, Redirected, PreflightError, RuntimeError) as change:
                live = self.regrouping.live
                has_state = self.regrouping.kept_state is not None
                if live is None or not live.continues_after(change, has_state=has_state):
                    raise
                self._enter_next_group(change, live)

    def _join_group(self) -> None:
        """Collective."""
        self.ddp.setup(self.regrouping.live)
        self.clock.mark("rendezvous")
        if self.config.dist.mode == "auto":
            self._settle_mode()
        may_leave = self.regrouping.live is not None
        self.preemption.join(self.ddp, self.progress, may_leave=may_leave)

    def _settle_mode(self) -> None:
        """Collective."""
        from drumline.training.memory.memory_plan import settle_mode  # few runs need it

        settled = settle_mode(
            with_local_data(self.config, self.ddp),
            self.task_class,
            self.ddp,
            lambda text: print_message(f"note: {text}"),
        )
        self.config = replace(settled, data=self.config.data)

    def _train(self) -> ExitCode:
        """Collective."""
        request = RunRequest(
            self.task,
            self.config,
            self.folder,
            self.fresh and not self.regrouping.is_continued,
            tuple(self.argv),
        )
        run = TrainingRun(
            request,
            self.task_class,
            self.ddp,
            self.progress,
            self.preemption,
            self.clock,
            self.regrouping,
        )
        return run.train()

    def _enter_next_group(self, change: BaseException, live: LiveNodes) -> None:
        """Leave the group that broke or has to grow, or that never was, and agree on the next."""
        if isinstance(change, NodesChanged):
            self.regrouping.kept_state = change.state
        self.preemption.leave_group()
        self.ddp.connection.heartbeat.mark(Phase.LEFT)  # no failure, for the sidecar
        live.leave()
        self.ddp.cleanup(broken=True)
        if not isinstance(change, Redirected):
            live.regroup()
        elif not live.join(change):
            self._leave_finished_run()
        write_rank(os.environ, live.topology().rank)
        self.clock = StartClock()

    def _leave_finished_run(self) -> NoReturn:
        """The run has ended without this node."""
        self.ddp.connection.heartbeat.mark(Phase.LEFT)  # no failure, for the sidecar
        live = self.regrouping.live
        if live is not None and live.is_first:
            print_message(f"node {live.number} did not join again: the run has ended")
        exit_now(ExitCode.SUCCESS)

    def end_failed(self, error: BaseException) -> NoReturn:
        """Report the error, and exit."""
        exit_code = failure_code(error, self.ddp, self.progress, run=self.folder)
        # Among several ranks the launcher does it, once none is restarted.
        if self.topology is None and exit_code == ExitCode.TRAINING_FAILED:
            from drumline.report.page import report_at_end

            report_at_end(self.folder)
        exit_now(exit_code)

    def leave(self, code: ExitCode) -> int:
        """Leave the group, and report the run on rank 0."""
        self.preemption.close()
        if self.regrouping.live is not None:
            self.regrouping.live.close()
        is_main = self.ddp.is_main_process()
        is_clean = self.ddp.cleanup()

        is_shown = self.config.log.display != "none"
        if is_main and self.config.log.profile is not None and code == ExitCode.SUCCESS:
            from drumline.cli.profile_report import report_profile

            report_profile(self.folder, shows=is_shown)
        if is_main:
            from drumline.report.page import report_at_end

            report_at_end(self.folder, prints=is_shown)

        if not is_clean or has_unfinished_tracker() or self.regrouping.is_continued:
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


def has_finished(folder: Path, *, since: float) -> bool:
    """Whether the run has reached its end after this time, in Unix seconds."""
    status = RunStatusReader(folder).read()
    return (
        status.state == "done"
        and status.last_event is not None
        and status.last_event["time"] > since
    )
