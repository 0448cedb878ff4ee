"""torchrun's agent for the ranks of one node: starts them, records which failed first, restarts
them if that can help.

It does not restart ranks that were preempted (`signalled_agent.py`), and reads the sidecar's
diagnosis, which decides whether others are restarted.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsSpecs,
    SignalException,
    Std,
)
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from drumline.base import rank_environment
from drumline.base.errors import DrumlineError, ExitCode
from drumline.base.job_secret import SECRET_ENV, new_secret
from drumline.base.rank_environment import FailureRecord, read_failure
from drumline.base.startup import process_start
from drumline.base.terminal import print_message
from drumline.base.text import how_it_ended, named_ranks
from drumline.launch.node.open_rendezvous import OwnRendezvous, address_of, open_rendezvous
from drumline.launch.node.rank_logs import failure_time, rank_file, rank_output
from drumline.launch.node.signalled_agent import Preempted, SignalledAgent
from drumline.launch.node_plan import NodePlan, Program, Supervision
from drumline.watch.watch_folder import DIAGNOSIS_S, SidecarDiagnosis, WatchFolder

# Ranks of a task that exit with one of these codes would do so again.
FINAL_CODES = frozenset({ExitCode.USAGE, ExitCode.PREFLIGHT_FAILED, ExitCode.HANG})
HEALTHY = RunResult(state=WorkerState.HEALTHY)
# How long torch waits for ranks that it ends because another one has failed.
TORCH_GRACE_S = 30.0
# Part of a supervisor's grace period that ranks get.
SUPERVISED_SHARE = 0.9
# How often the step of the ranks is reported to the controller.
PROGRESS_S = 2.0


class RankFiles(LogsSpecs):
    """The files of ranks. torch would name them by local rank, and truncate those of an earlier
    start."""

    def __init__(self, scratch: str, folder: Path | None, first_start: int = 0) -> None:
        super().__init__(scratch, Std.NONE, Std.NONE)
        self.scratch = Path(scratch)
        self.folder = folder
        self.num_starts = first_start
        self.variables: Mapping[str, str] = {}
        """Variables for all ranks of the next start."""

    @property
    def root_log_dir(self) -> str:
        return str(self.folder or self.scratch)

    def failure(self, rank: int) -> FailureRecord | None:
        return read_failure(self.scratch / f"failure-{rank}-{self.num_starts - 1}.json")

    def has_saved(self, rank: int) -> bool:
        """Whether this rank was preempted in this start, and the run has saved."""
        return self._saved_file(rank, self.num_starts - 1).exists()

    def _saved_file(self, rank: int, start: int) -> Path:
        return self.scratch / f"saved-{rank}-{start}"

    def stderr(self, rank: int) -> Path | None:
        """The stderr file of that rank in this start; None: it writes to the screen."""
        return (
            None if self.folder is None else rank_output(self.folder, rank, self.num_starts - 1)[1]
        )

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        start, self.num_starts = self.num_starts, self.num_starts + 1
        dest = LogsDest()
        for local_rank, variables in envs.items():
            rank = int(variables["RANK"])
            variables.update(self.variables)
            variables[rank_environment.FAILURE_FILE] = str(
                self.scratch / f"failure-{rank}-{start}.json"
            )
            variables[rank_environment.SAVED_FILE] = str(self._saved_file(rank, start))
            error = variables["TORCHELASTIC_ERROR_FILE"] = str(
                self.scratch / f"error-{rank}-{start}.json"
            )
            dest.error_files[local_rank] = error
            # An empty name does not redirect the stream.
            dest.stdouts[local_rank] = dest.stderrs[local_rank] = ""
            if self.folder is not None:
                out, err = rank_output(self.folder, rank, start)
                # An earlier launch with the same --logs may have left one.
                number_file = rank_file(self.folder, rank, start)
                number_file.unlink(missing_ok=True)
                variables[rank_environment.RANK_FILE] = str(number_file)
                dest.stdouts[local_rank] = str(out)
                dest.stderrs[local_rank] = str(err)
        dest.filtered_stdout = dest.filtered_stderr = str(self.scratch / "filtered")
        return dest


class NodeAgent(SignalledAgent):
    """Starts the ranks of one node, and restarts them if that can help."""

    def __init__(
        self,
        *,
        spec: Any,
        is_task: bool,
        supervision: Supervision,
        scratch: str,
        watch: WatchFolder,
    ) -> None:
        self.files = RankFiles(scratch, supervision.folder, supervision.first_start)
        # A supervisor ends this process, too, when the grace period is over: until then it must
        # have reported the end.
        self.grace_s = supervision.grace_s * (
            1.0 if supervision.folder is None else SUPERVISED_SHARE
        )
        # torch 2.11 always waits 30 s; where the grace period is shorter, the guard kills the rest.
        has_timeout = "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters
        timeout: dict[str, Any] = (
            {"shutdown_timeout": max(1, round(self.grace_s))} if has_timeout else {}
        )
        super().__init__(spec=spec, logs_specs=self.files, **timeout)
        self.rendezvous = spec.rdzv_handler
        self.is_task = is_task
        self.supervision = supervision
        self.watch = watch
        self.diagnosis: SidecarDiagnosis | None = None
        """The sidecars' diagnosis of the failure that ended this start."""
        self.failed_first: list[int] = []
        """Global ranks in the order of their failures, without those that the agent ended
        itself."""
        self._failed = False
        self._failure: FailureRecord | None = None
        """The failure of this start, as its ranks reported it."""
        self._failure_before: FailureRecord | None = None
        self._progress_at = 0.0

    # Starting ranks

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """A node may have failed because of another: a restart of all nodes counts once."""
        most = worker_group.spec.max_restarts
        nodes = self.rendezvous
        nodes.reached_step = max(nodes.reached_step, self.watch.furthest_step())
        with nodes.explained():
            while True:
                nodes.restarts_used = max(
                    nodes.restarts_used, most - max(0, self._remaining_restarts)
                )
                # A node may exit while the others wait for it; the rest try once more.
                with contextlib.suppress(dist.DistStoreError):
                    super()._rendezvous(worker_group)
                    break
        nodes.counted_step = max(nodes.counted_step, nodes.reached_step)
        self._remaining_restarts = max(0, most - nodes.restarts_used)

    def _assign_worker_ranks(self, *args: Any, **kwargs: Any) -> list[Worker]:
        """Where each node counts its ranks by itself, those of the nodes before it come first."""
        workers: list[Worker] = super()._assign_worker_ranks(*args, **kwargs)
        if isinstance(self.rendezvous, OwnRendezvous):
            node = self.rendezvous.node
            size = len(workers)
            for worker in workers:
                worker.global_rank = worker.role_rank = node.node_rank * size + worker.local_rank
                worker.world_size = worker.role_world_size = node.num_nodes * size
        return workers

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.preempt_signal:  # it came during the rendezvous
            raise Preempted(was_reported=False)
        self.failed_first = []
        self.diagnosis = None
        self._failure_before, self._failure = self._failure, None
        self.files.variables = self._variables()
        standby = self.supervision.standby
        with standby.serving() if standby else contextlib.nullcontext():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        self.set_handlers()
        self.supervision.report(
            "started",
            ranks=[worker.global_rank for worker in worker_group.workers],
            world_size=worker_group.workers[0].world_size,
            start=self.files.num_starts - 1,
            restarts_left=self._remaining_restarts,
        )
        self._report_progress()
        return ids

    def _variables(self) -> dict[str, str]:
        is_remote = self.supervision.folder is not None
        script = self.supervision.script_watch
        # Not for a restart, and not if the command was given on another machine, which has another
        # clock.
        is_first = self.files.num_starts == 0 and not is_remote
        variables = {
            rank_environment.COMMAND_START: f"{process_start():.2f}" if is_first else "",
            rank_environment.LOGS_SHOWN: "1" if self.is_task and is_remote else "",
            SECRET_ENV: self.rendezvous.ranks_secret,
            rank_environment.GRACE_S: f"{self.grace_s:g}",
            rank_environment.NODE_START: new_secret()[:16],
            rank_environment.LAUNCH_START: f"{process_start():.2f}",
        }
        if (folder := self.watch.begin(self.files.num_starts)) is not None:
            variables |= {
                rank_environment.WATCH_FOLDER: str(folder),
                **(script.variables() if script else {}),
            }
            if self.rendezvous.sidecars:
                variables[rank_environment.WATCH_NODES] = ",".join(self.rendezvous.sidecars)
        return variables

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.preempt_signal:
            raise Preempted(was_reported=False)
        if self.supervision.standby:  # missing standby processes load during the rendezvous
            self.supervision.standby.fill(at_once=True)
        most = worker_group.spec.max_restarts
        count = f"restart {most - self._remaining_restarts} of {most}"
        why = count if self._failed else self.rendezvous.restart_reason
        how = (
            "they resume from the newest checkpoint"
            if self.is_task
            else "the script starts from the beginning"
        )
        if isinstance(self.rendezvous, OwnRendezvous):
            how = "they join the other nodes after a round, or resume from the newest checkpoint"
        print_message(f"restarting the ranks ({why}); {how}")
        # torchrun's own count excludes a restart that another node caused.
        os.environ[rank_environment.RESTARTED] = "1"
        super()._restart_workers(worker_group)

    def _exit_barrier(self) -> None:
        self.rendezvous.wait_for_others()

    # Monitoring ranks

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._note_exits(worker_group)
        noted_at = time.monotonic()
        if noted_at - self._progress_at > PROGRESS_S:
            self.rendezvous.reached_step = max(
                self.rendezvous.reached_step, self.watch.furthest_step()
            )
            self._report_progress()
        if self.supervision.standby and not self.failed_first and self._remaining_restarts:
            self.supervision.standby.fill()
        self.raise_end_signal()
        now = self.exit_codes() if self.preempt_signal else set()
        if None in now and now <= {None, ExitCode.SUCCESS, ExitCode.PREEMPTED}:
            return HEALTHY  # torch would end ranks that still save
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.SUCCEEDED and self.rendezvous.are_others_running():
            return HEALTHY  # torch asks again, and checks whether another node waits
        if (
            result.is_failed()
            and not self.preempt_signal
            and self.has_saved(result)
            and self._is_node_waiting()
        ):
            self._failed = False
            return HEALTHY  # torch restarts them, because a node waits
        self._failed = result.is_failed()
        if not self._failed:
            return result
        codes = {failure.exitcode for failure in result.failures.values()}
        if self.preempt_signal or (self.is_task and codes & {*FINAL_CODES, ExitCode.PREEMPTED}):
            self._remaining_restarts = 0
        if self.failed_first:
            result.failures = {rank: result.failures[rank] for rank in self.failed_first}
            codes = {failure.exitcode for failure in result.failures.values()}
        self._read_failures(result.failures)
        rank, first = first_failure(result, None)
        if not self.failed_first:  # it exited between two checks
            self.watch.note_exit(rank, first.exitcode)
        # Do not wait for the sidecar if ranks were preempted, or have reported an error that a
        # restart cannot fix.
        is_known = self.preempt_signal or (
            self.is_task and codes <= {*FINAL_CODES, ExitCode.PREEMPTED}
        )
        deadline = noted_at if is_known else noted_at + DIAGNOSIS_S
        self.apply(self.watch.wait_for_diagnosis(deadline), first.exitcode)
        return result

    def _note_exits(self, worker_group: WorkerGroup) -> None:
        """Report the ranks that exited, before torch ends the others."""
        failures = []
        for local_rank, handler in self._handlers().items():
            code = handler.proc.poll()
            rank = worker_group.workers[local_rank].global_rank
            if code is not None:
                self.watch.note_exit(rank, code)
            if code:
                failures.append((failure_time(self.files.stderr(rank)), rank, code))
        if failures:
            self._count_progress([rank for _, rank, _ in failures])
        records = self._read_failures([rank for _, rank, _ in failures])
        followers = {rank for rank, record in records.items() if record.rank != rank}
        failures.sort(key=lambda failure: (failure[1] in followers, *failure))
        self.failed_first = [rank for _, rank, _ in failures]
        is_watched = bool(failures) and self.watch.has_sidecar()
        for failed_at, rank, code in failures:
            self.supervision.report(
                "failed",
                rank=rank,
                code=code,
                at=failed_at,
                start=self.files.num_starts - 1,
                restarts_left=self._remaining_restarts,
                is_watched=is_watched,
                follows=rank in followers,
                error=records[rank].error if rank in records else "",
                full_disk=records[rank].full_disk if rank in records else "",
            )

    def _count_progress(self, ranks: Iterable[int]) -> None:
        """A restart counts only against the same step: after progress all of them are left
        again."""
        nodes = self.rendezvous
        records = [record for rank in ranks if (record := self.files.failure(rank)) is not None]
        steps = [record.step for record in records if record.step is not None]
        nodes.reached_step = max(nodes.reached_step, self.watch.furthest_step(), *steps)
        if nodes.reached_step > nodes.counted_step:
            nodes.restarts_used = 0
            self._remaining_restarts = self._worker_group.spec.max_restarts
        self._report_progress()

    def _report_progress(self) -> None:
        self._progress_at = time.monotonic()
        nodes = self.rendezvous
        self.supervision.report(
            "progress", reached_step=nodes.reached_step, counted_step=nodes.counted_step
        )

    def _read_failures(self, ranks: Iterable[int]) -> dict[int, FailureRecord]:
        """The failure records of ranks that have exited. If a restart cannot help, none is left."""
        records = {
            rank: record for rank in ranks if (record := self.files.failure(rank)) is not None
        }
        for record in records.values():
            self._failure = record
            if not record.can_restart or record.repeats(self._failure_before):
                self._remaining_restarts = 0
        return records

    def apply(self, diagnosis: SidecarDiagnosis | None, rank_code: int) -> None:
        if diagnosis is None or self.diagnosis is not None:
            return
        if not diagnosis.explains_more(rank_code, is_task=self.is_task):
            diagnosis = replace(diagnosis, was_printed=True)  # by the rank
        self.diagnosis = diagnosis
        if diagnosis.is_final:
            self._remaining_restarts = 0
        is_last = self._remaining_restarts == 0
        self.supervision.report("diagnosis", **vars(diagnosis), is_last=is_last)
        if not is_last and not diagnosis.was_printed and self.supervision.folder is None:
            print_message(diagnosis.sentence)

    def has_saved(self, result: RunResult) -> bool:
        """Whether the ranks were preempted by a signal to another node, and have saved."""
        codes = {failure.exitcode for failure in result.failures.values()}
        return self.is_task and codes == {ExitCode.PREEMPTED}

    def has_reported_save(self) -> bool:
        return any(
            self.files.has_saved(worker.global_rank) for worker in self._worker_group.workers
        )

    def _is_node_waiting(self) -> bool:
        """Whether the ranks stopped because another agent ended its ranks to let a waiting node
        join."""
        with contextlib.suppress(DrumlineError):  # the first node may have left already
            return self.rendezvous.num_nodes_waiting() > 0
        return False

    # Ending ranks

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any
    ) -> None:
        """Ranks that do not exit are killed by torch after the grace period: that is reported, here
        and to the sidecar, which would look for who did it, as for ranks that are killed at
        once."""
        is_grace_period = (
            "timeout" in kwargs
        )  # otherwise torch's own limit applies, whatever --grace is
        grace_s = float(kwargs.get("timeout", TORCH_GRACE_S))
        running = [local_rank for local_rank, code in self.codes().items() if code is None]
        if running:
            why = "" if self._failed else self.rendezvous.restart_reason
            self.watch.note_ending(0.0 if death_sig == signal.SIGKILL else grace_s, why=why)
        begun = time.monotonic()
        super()._shutdown(death_sig, *args, **kwargs)
        if death_sig == signal.SIGKILL or time.monotonic() - begun < grace_s:
            return
        codes = self.codes()
        workers = self._worker_group.workers
        killed = [
            workers[rank].global_rank for rank in running if codes.get(rank) == -signal.SIGKILL
        ]
        if killed:
            whom = "it" if len(killed) == 1 else "them"
            advice = "check the ends of the ranks' logs for what they were doing"
            if is_grace_period:
                advice = "give ranks more time with drumline launch --grace SECONDS"
            print_message(
                f"{named_ranks(killed)} did not exit within {grace_s:g} s after {death_sig.name}, so the launcher "
                f"killed {whom}",
                f"try: {advice}",
            )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """With SIGTERM, so that ranks save before a node joins. After a lost node they cannot
        save."""
        if self.is_task and self.rendezvous.has_lost_node:
            self._shutdown(signal.SIGKILL)
        else:
            super()._stop_workers(worker_group)


@contextlib.contextmanager
def _scratch_folder(watch: WatchFolder) -> Iterator[str]:
    """For files of failures. The guard removes it with the watch folder, also if this process is
    killed."""
    if watch.root is None:
        with tempfile.TemporaryDirectory(prefix="drumline-agent-") as folder:
            yield folder
    else:
        scratch = watch.root / "agent"
        scratch.mkdir(mode=0o700, exist_ok=True)
        yield str(scratch)


def run_agent(
    node: NodePlan, num_procs: int, program: Program, supervision: Supervision, watch: WatchFolder
) -> tuple[RunResult, SidecarDiagnosis | None]:
    """Run the ranks of this node to their end; raises Preempted, or SignalException when this
    process must exit."""
    # torch's knowledge of this machine: which cores are near which GPU. Without files of its own:
    # it would leave a folder in the temporary directory.
    no_files = DefaultLogsSpecs(log_dir=os.devnull)
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=num_procs, logs_specs=no_files)
    rendezvous = open_rendezvous(node, supervision.secret, continues=program.continues)
    spec = WorkerSpec(
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
    with _scratch_folder(watch) as scratch:
        agent = NodeAgent(
            spec=spec,
            is_task=program.is_task,
            supervision=supervision,
            scratch=scratch,
            watch=watch,
        )
        agent._remaining_restarts = max(0, node.max_restarts - node.restarts_used)
        try:
            result: RunResult = agent.run()
            agent.check_preempted(agent.preempt_signal)
        except SignalException as error:
            agent.apply(watch.diagnosis(), -signal.SIGTERM)  # the sidecar's diagnosis so far
            # without closing it: this node may join again, and the others continue
            rendezvous.leave()
            agent.check_preempted(error.sigval)
            raise
        except BaseException:
            rendezvous.shutdown()
            raise
        finally:
            if supervision.standby:
                supervision.standby.close()
            rendezvous.warn_of_missing_nodes()
        if result.is_failed() and not agent.has_saved(result):
            rank, failure = first_failure(result, agent.diagnosis)
            what = f"rank {rank} failed ({how_it_ended(failure.exitcode)})"
            code = ExitCode.TRAINING_FAILED
            if agent.diagnosis is not None:
                what = agent.diagnosis.sentence if agent.diagnosis.is_hang else agent.diagnosis.what
                code = ExitCode.HANG if agent.diagnosis.is_hang else code
            rendezvous.publish_failure(what, code)
        rendezvous.shutdown()
    return result, agent.diagnosis


def first_failure(
    result: RunResult, diagnosis: SidecarDiagnosis | None
) -> tuple[int, ProcessFailure]:
    """The rank that the diagnosis blames, if it has failed here; otherwise the earliest failure of
    this node."""
    if diagnosis is not None and diagnosis.rank in result.failures:
        return diagnosis.rank, result.failures[diagnosis.rank]
    return min(result.failures.items(), key=lambda item: item[1].timestamp)
