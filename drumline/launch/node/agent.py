"""torchrun's agent for the ranks of one node: starts them, reports which failed first, and restarts
them if that can help.

Whether a restart can help is decided by what ranks report, and by the sidecar's diagnosis; ranks
that were preempted (`rank_exchange.py`) are not restarted.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from subprocess import Popen
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from drumline.base import rank_environment
from drumline.base.errors import DrumlineError, ExitCode
from drumline.base.job_secret import SECRET_ENV, new_secret
from drumline.base.rank_environment import FailureRecord
from drumline.base.startup import process_start
from drumline.base.text import how_it_ended, named_ranks, print_message
from drumline.launch.node.node_rendezvous import (
    AgentRendezvous,
    OwnRendezvous,
    address_of,
    open_rendezvous,
)
from drumline.launch.node.rank_exchange import RankFiles, RankSignals
from drumline.launch.node.rank_logs import failure_time
from drumline.launch.node_plan import NodePlan, Program, Supervision
from drumline.watch.watch_folder import DIAGNOSIS_S, SidecarDiagnosis, WatchFolder

HEALTHY = RunResult(state=WorkerState.HEALTHY)
# How long torch waits for ranks that it ends because another one has failed.
TORCH_GRACE_S = 30.0
# Part of a supervisor's grace period that ranks get.
SUPERVISED_SHARE = 0.9
# How often the step of the ranks is reported to the controller.
PROGRESS_S = 2.0
# Ranks of a task that exit with one of these codes would do so again.
FINAL_CODES = frozenset({ExitCode.USAGE, ExitCode.PREFLIGHT_FAILED, ExitCode.HANG})
# Ranks of a task that exit with one of these codes are not restarted.
ENDING_CODES = FINAL_CODES | {ExitCode.PREEMPTED}


class FailedRank(NamedTuple):
    """A rank that has exited with an error in this start."""

    failed_at: float
    rank: int
    code: int


class NodeAgent(LocalElasticAgent):
    """Starts the ranks of one node, and restarts them if that can help.

    torch's public hooks are its rendezvous handler (`rendezvous`) and its log files (`files`). What
    they cannot do is done in the overridden private methods, which come first; each says why.
    """

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        is_task: bool,
        supervision: Supervision,
        scratch: str,
        watch: WatchFolder,
    ) -> None:
        self.files = RankFiles(scratch, supervision.folder, supervision.first_start)
        self.grace_s = supervision.grace_s
        if supervision.folder is not None:
            # A supervisor ends this process, too, when the grace period is over: until then it must
            # have reported the end.
            self.grace_s *= SUPERVISED_SHARE

        options: dict[str, Any] = {}
        # torch 2.11 always waits 30 s; where the grace period is shorter, the guard kills the rest.
        if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:
            options["shutdown_timeout"] = max(1, round(self.grace_s))
        super().__init__(spec=spec, logs_specs=self.files, **options)

        handler: Any = spec.rdzv_handler
        self.rendezvous: AgentRendezvous = handler
        self._remaining_restarts = max(0, spec.max_restarts - self.rendezvous.restarts_used)
        self.is_task = is_task
        self.supervision = supervision
        self.watch = watch
        self.signals = RankSignals(
            lambda: self._processes().values(),
            self.rendezvous,
            is_task=is_task,
        )
        self._failed_first: list[int] = []
        """Global ranks in the order of their failures in this start, without those that the agent
        ended itself."""
        self._record: FailureRecord | None = None
        """The last failure, as its rank reported it."""
        self._record_before: FailureRecord | None = None
        """The same, of the start before this one."""
        self.diagnosis: SidecarDiagnosis | None = None
        """The sidecars' diagnosis of the failure that ended this start."""
        self._failed = False
        self._progress_at = 0.0

    # What torch has no public hook for

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Overridden because the nodes count restarts together (a node may have failed because of
        another), and because one may exit while the others wait for it: the rest try again."""
        max_restarts = worker_group.spec.max_restarts
        nodes = self.rendezvous
        self._read_progress()
        with nodes.explained():
            while True:
                used_here = max_restarts - max(0, self._remaining_restarts)
                nodes.restarts_used = max(nodes.restarts_used, used_here)
                with contextlib.suppress(dist.DistStoreError):
                    super()._rendezvous(worker_group)
                    break

        nodes.counted_step = max(nodes.counted_step, nodes.reached_step)
        self._remaining_restarts = max(0, max_restarts - nodes.restarts_used)
        if isinstance(nodes, OwnRendezvous):
            self._count_ranks_before(worker_group, nodes.node)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Overridden because ranks begin in standby processes, and because torch sets its signal
        handlers here, which ours replace."""
        self.signals.raise_if_asked_to_stop()  # during the rendezvous
        self._failed_first = []
        self._record_before = self._record
        self._record = None
        self.diagnosis = None
        self.files.variables = self._variables()
        standby = self.supervision.standby
        with standby.serving() if standby else contextlib.nullcontext():
            ids: dict[int, Any] = super()._start_workers(worker_group)

        self.signals.set_handlers()
        self.supervision.report(
            "started",
            ranks=[worker.global_rank for worker in worker_group.workers],
            world_size=worker_group.workers[0].world_size,
            start=self.files.num_starts - 1,
            restarts_left=self._remaining_restarts,
        )
        self._report_progress()
        return ids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Overridden because the user reads why, before the ranks are ended, and because standby
        processes load during the rendezvous."""
        self.signals.raise_if_asked_to_stop()
        if self.supervision.standby:
            self.supervision.standby.fill(at_once=True)

        print_message(f"restarting the ranks ({self._why_restarted()}); {self._how_restarted()}")
        # torchrun's own count excludes a restart that another node caused.
        os.environ[rank_environment.RESTARTED] = "1"
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Overridden because torch ends the other ranks as soon as it sees that one has failed:
        exits are reported before, and ranks that save, or may be needed again, are not over."""
        self._note_exits(worker_group)
        noted_at = time.monotonic()
        self._follow_progress(noted_at)
        self.signals.raise_end_signal()
        if self.signals.are_ranks_saving():
            return HEALTHY  # torch would end them

        if self._failed_first:
            self.watch.note_ending(TORCH_GRACE_S)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.SUCCEEDED and self.rendezvous.are_others_running():
            return HEALTHY  # torch asks again, and checks whether another node waits
        if result.is_failed() and self._have_stopped_for_node(result):
            self._failed = False
            return HEALTHY  # torch restarts them, because a node waits

        self._failed = result.is_failed()
        if self._failed:
            self._explain_failure(result, noted_at)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Overridden because ranks cannot save after a lost node: they are killed at once. Before a
        node joins they get SIGTERM, and save."""
        if self.is_task and self.rendezvous.has_lost_node:
            self._shutdown(signal.SIGKILL)
        else:
            super()._stop_workers(worker_group)

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any
    ) -> None:
        """Overridden because the sidecar would look for who ended the ranks, and because torch does
        not report those that it kills when they do not exit."""
        # torch gives it at the end of a run; otherwise its own limit applies, whatever --grace is.
        grace_s = 0.0
        if death_sig != signal.SIGKILL:
            grace_s = float(kwargs.get("timeout", TORCH_GRACE_S))
        running = [local_rank for local_rank, code in self.exit_codes().items() if code is None]
        if running:
            why = "" if self._failed else self.rendezvous.restart_reason
            self.watch.note_ending(grace_s, why=why)

        begun = time.monotonic()
        if death_sig == signal.SIGINT and self.is_task:
            self.signals.terminate_loading_ranks()
        super()._shutdown(death_sig, *args, **kwargs)

        if death_sig != signal.SIGKILL and time.monotonic() - begun >= grace_s:
            self._report_killed(running, grace_s, death_sig)

    def _report_killed(
        self,
        local_ranks: list[int],
        grace_s: float,
        death_sig: signal.Signals,
    ) -> None:
        """Name those of these ranks that torch had to kill."""
        codes = self.exit_codes()
        killed = [
            self._worker_group.workers[local_rank].global_rank
            for local_rank in local_ranks
            if codes.get(local_rank) == -signal.SIGKILL
        ]
        if killed:
            print_message(
                f"{named_ranks(killed)} did not exit within {grace_s:g} s after {death_sig.name}, so the launcher "
                "killed them",
                "try: read the ends of the ranks' logs; at the end of a run --grace SECONDS gives them more time",
            )

    def _exit_barrier(self) -> None:
        """Overridden because torch waits 300 s at most, without a message, and also for a node that
        is lost."""
        self.rendezvous.wait_for_others()

    # Starting ranks

    def _count_ranks_before(self, worker_group: WorkerGroup, node: NodePlan) -> None:
        """Where each node counts its ranks by itself, those of the nodes before it come first."""
        num_local = len(worker_group.workers)
        for worker in worker_group.workers:
            worker.global_rank = node.node_rank * num_local + worker.local_rank
            worker.role_rank = worker.global_rank
            worker.world_size = node.num_nodes * num_local
            worker.role_world_size = worker.world_size

    def _variables(self) -> dict[str, str]:
        """For the ranks of the next start."""
        is_remote = self.supervision.folder is not None
        # Not for a restart, and not if the command was given on another machine, which has another
        # clock.
        is_first = self.files.num_starts == 0 and not is_remote
        launched_at = f"{process_start():.2f}"
        variables = {
            rank_environment.COMMAND_START: launched_at if is_first else "",
            rank_environment.LOGS_SHOWN: "1" if self.is_task and is_remote else "",
            SECRET_ENV: self.rendezvous.ranks_secret,
            rank_environment.GRACE_S: f"{self.grace_s:g}",
            rank_environment.NODE_START: new_secret()[:16],
            rank_environment.LAUNCH_START: launched_at,
        }

        folder = self.watch.begin(self.files.num_starts)
        if folder is not None:
            variables[rank_environment.WATCH_FOLDER] = str(folder)
            if self.supervision.script_watch:
                script_watch = json.dumps(asdict(self.supervision.script_watch))
                variables[rank_environment.SCRIPT_WATCH] = script_watch
            if self.rendezvous.sidecars:
                variables[rank_environment.WATCH_NODES] = ",".join(self.rendezvous.sidecars)

        return variables

    def _why_restarted(self) -> str:
        """A node that joined or is lost, or the number of this restart."""
        if not self._failed:
            return self.rendezvous.restart_reason

        max_restarts = self._worker_group.spec.max_restarts
        return f"restart {max_restarts - self._remaining_restarts} of {max_restarts}"

    def _how_restarted(self) -> str:
        """Where the ranks continue."""
        if isinstance(self.rendezvous, OwnRendezvous):
            return "they join the other nodes after a round, or resume from the newest checkpoint"
        if self.is_task:
            return "they resume from the newest checkpoint"
        return "the script starts from the beginning"

    # Monitoring ranks

    def _follow_progress(self, now: float) -> None:
        """At each look at the ranks: report their step now and then, and fill the standby."""
        if now - self._progress_at > PROGRESS_S:
            self._read_progress()
            self._report_progress()

        standby = self.supervision.standby
        if standby and not self._failed_first and self._remaining_restarts:
            standby.fill()

    def _read_progress(self) -> None:
        """Note the furthest step that the ranks have reached."""
        nodes = self.rendezvous
        nodes.reached_step = max(nodes.reached_step, self.watch.furthest_step())

    def _report_progress(self) -> None:
        """To the controller."""
        self._progress_at = time.monotonic()
        nodes = self.rendezvous
        self.supervision.report(
            "progress",
            reached_step=nodes.reached_step,
            counted_step=nodes.counted_step,
        )

    def _note_exits(self, worker_group: WorkerGroup) -> None:
        """Report the ranks that exited, before torch ends the others."""
        failed_ranks = []
        for local_rank, code in self.exit_codes().items():
            rank = worker_group.workers[local_rank].global_rank
            if code is not None:
                self.watch.note_exit(rank, code)
            if code:
                failed_ranks.append(FailedRank(failure_time(self.files.stderr(rank)), rank, code))

        if failed_ranks:
            self._note_failures(failed_ranks)
        else:
            self._failed_first = []

    def _note_failures(self, failed_ranks: list[FailedRank]) -> None:
        """Report them to the controller, the first failure first."""
        records = self.files.failures(failed.rank for failed in failed_ranks)
        self._count_progress(records.values())
        self._limit_restarts(records.values())

        followers = {rank for rank, record in records.items() if record.rank != rank}
        in_order = sorted(failed_ranks, key=lambda failed: (failed.rank in followers, *failed))
        self._failed_first = [failed.rank for failed in in_order]

        is_watched = self.watch.has_sidecar()
        for failed in in_order:
            record = records.get(failed.rank)
            self.supervision.report(
                "failed",
                rank=failed.rank,
                code=failed.code,
                failed_at=failed.failed_at,
                start=self.files.num_starts - 1,
                restarts_left=self._remaining_restarts,
                is_watched=is_watched,
                is_follower=failed.rank in followers,
                error=record.error if record else "",
                full_disk=record.full_disk if record else "",
            )

    def _count_progress(self, records: Iterable[FailureRecord]) -> None:
        """A restart counts only against the same step: after progress all of them are left
        again."""
        nodes = self.rendezvous
        self._read_progress()
        steps = [record.step or 0 for record in records]
        nodes.reached_step = max([nodes.reached_step, *steps])
        if nodes.reached_step > nodes.counted_step:
            nodes.restarts_used = 0
            self._remaining_restarts = self._worker_group.spec.max_restarts

        self._report_progress()

    def _limit_restarts(self, records: Iterable[FailureRecord]) -> None:
        """If a restart cannot help, as ranks that have exited reported it, none is left."""
        for record in records:
            self._record = record
            if not record.can_restart or record.repeats(self._record_before):
                self._remaining_restarts = 0

    def _explain_failure(self, result: RunResult, noted_at: float) -> None:
        """Find out whether a restart can help, and wait for the sidecar's diagnosis if that may
        explain more."""
        preempt_signal = self.signals.preempt_signal
        if preempt_signal or (self.is_task and exit_codes_of(result) & ENDING_CODES):
            self._remaining_restarts = 0

        if self._failed_first:
            result.failures = {rank: result.failures[rank] for rank in self._failed_first}
        self._limit_restarts(self.files.failures(result.failures).values())
        rank, failure = first_failure(result, None)
        if not self._failed_first:  # it exited between two checks
            self.watch.note_exit(rank, failure.exitcode)

        # Ranks were preempted, or have reported an error that a restart cannot fix.
        is_explained = preempt_signal or (self.is_task and exit_codes_of(result) <= ENDING_CODES)
        deadline = noted_at if is_explained else noted_at + DIAGNOSIS_S
        self.apply(self.watch.diagnosis(deadline), failure.exitcode)

    def apply(self, diagnosis: SidecarDiagnosis | None, rank_code: int) -> None:
        """The first diagnosis of a start is reported, and decides about a restart."""
        if diagnosis is None or self.diagnosis is not None:
            return

        if not diagnosis.explains_more(rank_code, is_task=self.is_task):
            diagnosis = replace(diagnosis, was_printed=True)  # by the rank
        self.diagnosis = diagnosis
        if diagnosis.is_final:
            self._remaining_restarts = 0

        is_last = self._remaining_restarts == 0
        self.supervision.report("diagnosis", **asdict(diagnosis), is_last=is_last)
        if not is_last and not diagnosis.was_printed and self.supervision.folder is None:
            print_message(diagnosis.sentence)

    def were_preempted(self, result: RunResult) -> bool:
        """Whether the ranks were preempted by a signal to another node, and have saved."""
        return self.is_task and exit_codes_of(result) == {ExitCode.PREEMPTED}

    def _have_stopped_for_node(self, result: RunResult) -> bool:
        """Whether the ranks stopped because another agent ended its ranks to let a waiting node
        join."""
        if self.signals.preempt_signal or not self.were_preempted(result):
            return False
        with contextlib.suppress(DrumlineError):  # the first node may have left already
            return self.rendezvous.is_node_waiting()
        return False

    def raise_if_preempted(self, number: int | None) -> None:
        """After a run: raise Preempted if that is why it ended. `number`: the signal, if one
        came."""
        workers = self._worker_group.workers
        is_save_reported = any(self.files.reports_save(worker.global_rank) for worker in workers)
        self.signals.raise_if_ranks_stopped(number, is_save_reported=is_save_reported)

    # The processes of ranks

    def _processes(self) -> dict[int, Popen[Any]]:
        """By local rank."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def exit_codes(self) -> dict[int, int | None]:
        """By local rank; None: it runs."""
        return {local_rank: process.poll() for local_rank, process in self._processes().items()}


def exit_codes_of(result: RunResult) -> set[int]:
    """Those of the ranks of this node that failed."""
    return {failure.exitcode for failure in result.failures.values()}


def first_failure(
    result: RunResult, diagnosis: SidecarDiagnosis | None
) -> tuple[int, ProcessFailure]:
    """The rank that the diagnosis blames, if it has failed here; otherwise the earliest failure of
    this node."""
    if diagnosis is not None and diagnosis.rank in result.failures:
        return diagnosis.rank, result.failures[diagnosis.rank]
    return min(result.failures.items(), key=lambda item: item[1].timestamp)


def run_agent(
    node: NodePlan,
    num_procs: int,
    program: Program,
    supervision: Supervision,
    watch: WatchFolder,
) -> tuple[RunResult, SidecarDiagnosis | None]:
    """Run the ranks of this node to their end; raises Preempted, or SignalException when this
    process must exit."""
    rendezvous = open_rendezvous(node, supervision.secret, continues=program.continues)
    # For files of failures. The guard removes it with the watch folder, also if this process is killed.
    with tempfile.TemporaryDirectory(prefix="drumline-agent-", dir=watch.root) as scratch:
        agent = NodeAgent(
            spec=_worker_spec(node, num_procs, program, rendezvous),
            is_task=program.is_task,
            supervision=supervision,
            scratch=scratch,
            watch=watch,
        )

        try:
            result: RunResult = agent.run()
            agent.raise_if_preempted(agent.signals.preempt_signal)
        except SignalException as error:
            # the sidecar's diagnosis so far
            agent.apply(watch.diagnosis(), -signal.SIGTERM)
            # without closing it: this node may join again, and the others continue
            rendezvous.leave()
            agent.raise_if_preempted(error.sigval)
            raise
        except BaseException:
            rendezvous.shutdown()
            raise
        finally:
            if supervision.standby:
                supervision.standby.close()
            rendezvous.warn_of_missing_nodes()

        diagnosis = agent.diagnosis
        if result.is_failed() and not agent.were_preempted(result):
            _publish_failure(rendezvous, result, diagnosis)
        rendezvous.shutdown()

    return result, diagnosis


def _worker_spec(
    node: NodePlan,
    num_procs: int,
    program: Program,
    rendezvous: AgentRendezvous,
) -> WorkerSpec:
    """What torch's agent starts, and how often."""
    # torch's knowledge of this machine: which cores are near which GPU. Without files of its own:
    # it would leave a folder in the temporary directory.
    no_files = DefaultLogsSpecs(log_dir=os.devnull)
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=num_procs, logs_specs=no_files)
    return WorkerSpec(
        role=config.role,
        local_world_size=num_procs,
        entrypoint=sys.executable,
        args=tuple(program.python_arguments()),
        rdzv_handler=rendezvous,
        max_restarts=node.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=address_of(node),
        numa_options=config.numa_options,
    )


def _publish_failure(
    rendezvous: AgentRendezvous,
    result: RunResult,
    diagnosis: SidecarDiagnosis | None,
) -> None:
    """For the other nodes: why this one ends the job."""
    if diagnosis is not None and diagnosis.is_hang:
        rendezvous.publish_failure(diagnosis.sentence, ExitCode.HANG)
        return

    rank, failure = first_failure(result, None)
    what = f"rank {rank} failed ({how_it_ended(failure.exitcode)})"
    if diagnosis is not None:
        what = diagnosis.what
    rendezvous.publish_failure(what, ExitCode.TRAINING_FAILED)
