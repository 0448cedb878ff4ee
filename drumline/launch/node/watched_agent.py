"""The agent of a node under supervision: ranks write to files of their own, and who failed first is told at once.

It is also the launcher's end of the watch: each start gets a watch folder, the sidecar reads there how ranks ended, and
what the sidecar says of it decides whether they are started again.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import LogsDest, SubprocessContext

from drumline.errors import ExitCode
from drumline.launch.node.leaving_agent import LeavingAgent
from drumline.launch.node.meeting import Alone
from drumline.launch.node.rendezvous import FixedRanks
from drumline.launch.node.standby import Standby
from drumline.launch.node.supervision import RankOutput, Supervision, failure_time, rank_output
from drumline.launch.node.watch_folder import DIAGNOSIS_S, Ruling, WatchFolder
from drumline.launch.rank_environment import (
    COMMAND_START,
    FAILURE_FILE,
    LOGS_SHOWN,
    WATCH_FOLDER,
    WATCH_NODES,
    FailureRecord,
    process_start,
    read_failure,
)
from drumline.net.secrets import VARIABLE as SECRET
from drumline.terminal import print_message


class RankFiles(LogsSpecs):
    """Where ranks write. torch's own names files by the node's own numbers, and empties those of an earlier start."""

    def __init__(self, scratch: str, folder: Path | None, first_start: int = 0) -> None:
        super().__init__(scratch, Std.NONE, Std.NONE)
        self.scratch = Path(scratch)
        self.folder = folder
        self.num_starts = first_start
        self.variables: Mapping[str, str] = {}
        """For all ranks of the next start."""
        self.current: dict[int, RankOutput] = {}
        """By global rank."""

    @property
    def root_log_dir(self) -> str:
        return str(self.folder or self.scratch)

    def failure_file(self, rank: int, start: int) -> Path:
        """What that rank leaves of its failure."""
        return self.scratch / f"failure-{rank}-{start}.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        start, self.num_starts = self.num_starts, self.num_starts + 1
        self.current = {}
        dest = LogsDest()
        for local_rank, variables in envs.items():
            rank = int(variables["RANK"])
            variables.update(self.variables)
            error_file = self.scratch / f"error-{rank}-{start}.json"
            variables[FAILURE_FILE] = str(self.failure_file(rank, start))
            variables["TORCHELASTIC_ERROR_FILE"] = dest.error_files[local_rank] = str(error_file)
            # An empty name leaves the stream as it is.
            dest.stdouts[local_rank] = dest.stderrs[local_rank] = ""
            if self.folder is not None:
                output = self.current[rank] = rank_output(self.folder, rank, start)
                dest.stdouts[local_rank], dest.stderrs[local_rank] = str(output.out), str(output.err)
        dest.filtered_stdout = dest.filtered_stderr = str(self.scratch / "filtered")
        return dest


class WatchedAgent(LeavingAgent):
    """Sees which ranks ended by themselves before torch's agent ends the others, and tells of them alone."""

    def __init__(
        self, *args: Any, supervision: Supervision, scratch: str, watch: WatchFolder, **kwargs: Any
    ) -> None:
        self.files = RankFiles(scratch, supervision.folder, supervision.first_start)
        # torch 2.11 takes 30 s whatever is wished; who waits for less kills the rest.
        if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:
            kwargs["shutdown_timeout"] = max(1, round(supervision.grace_s))
        super().__init__(*args, logs_specs=self.files, **kwargs)
        self.supervision = supervision
        self.tell = supervision.tell
        self.watch = watch
        self.standby: Standby | None = None
        """Where ranks may begin that are started again."""
        self.ruling: Ruling | None = None
        """What the sidecars said of the failure that this start ended with."""
        self.failed_first: list[int] = []
        """Global ranks, the first one first; those that the agent ended itself are not among them."""
        self._failure: FailureRecord | None = None
        """What this start failed by, as its ranks know it."""
        self._failure_before: FailureRecord | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.failed_first, self.ruling = [], None
        self._failure_before, self._failure = self._failure, None
        self.files.variables = {
            COMMAND_START: self._command_start(),
            LOGS_SHOWN: "1" if self.is_task and self.supervision.folder is not None else "",
            **self._watch_variables(worker_group),
        }
        with self.standby.serving() if self.standby else contextlib.nullcontext():
            ids: dict[int, Any] = super()._start_workers(worker_group)
        start = self.files.num_starts - 1
        ranks = [worker.global_rank for worker in worker_group.workers]
        facts = {"start": start, "restarts_left": self._remaining_restarts}
        self.tell({"kind": "started", "ranks": ranks, "world_size": _world_size(worker_group), **facts})
        return ids

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.standby:  # those that are missing load while the nodes meet
            self.standby.fill(at_once=True)
        super()._restart_workers(worker_group)

    def _command_start(self) -> str:
        """Nothing for a start after a failure, nor where the command was given on another machine, by its clock."""
        is_the_users = self.files.num_starts == 0 and self.supervision.folder is None
        return f"{process_start():.2f}" if is_the_users else ""

    def _watch_variables(self, worker_group: WorkerGroup) -> dict[str, str]:
        handler = worker_group.spec.rdzv_handler
        assert isinstance(handler, Alone | FixedRanks)
        folder, script = self.watch.begin(self.files.num_starts), self.supervision.script_watch
        variables = {SECRET: handler.ranks_secret}
        if folder is None:
            return variables
        variables[WATCH_FOLDER] = str(folder)
        if handler.sidecars:
            variables[WATCH_NODES] = ",".join(handler.sidecars)
        return {**variables, **(script.variables() if script else {})}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._note_ends(worker_group)
        if self.standby and not self.failed_first and self._remaining_restarts:
            self.standby.fill()
        noted_at = time.monotonic()
        result = super()._monitor_workers(worker_group)
        if self.failed_first and result.is_failed():
            result.failures = {rank: result.failures[rank] for rank in self.failed_first}
        if result.is_failed():
            self._read_failures(result.failures)
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            self._heed(self._wait_for_ruling(result, noted_at + DIAGNOSIS_S), first.exitcode)
        return result

    def _wait_for_ruling(self, result: RunResult, deadline: float) -> Ruling | None:
        codes = {failure.exitcode for failure in result.failures.values()}
        if self.told or (self.is_task and codes <= {*self.final_codes, ExitCode.PREEMPTED}):
            return self.watch.ruling()  # they left, or have told why nothing else can help
        if not self.failed_first:  # it ended between two looks
            rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
            self.watch.note_exit(rank, failure.exitcode)
        return self.watch.wait_for_ruling(deadline)

    def _heed(self, ruling: Ruling | None, rank_code: int) -> None:
        """Whether ranks are started again is decided by who saw what was wrong with them."""
        if ruling is None or self.ruling is not None:
            return
        if not ruling.tells_more(rank_code, is_task=self.is_task):
            ruling = replace(ruling, was_told=True)  # by the rank
        self.ruling = ruling
        if ruling.is_final:
            self._remaining_restarts = 0
        is_last = self._remaining_restarts == 0
        self.tell({"kind": "ruling", **vars(ruling), "is_last": is_last})
        if not is_last and not ruling.was_told and self.supervision.folder is None:
            print_message(ruling.sentence)

    def last_look(self) -> None:
        """When the agent itself is told to end: what the sidecar has said until then."""
        self._heed(self.watch.ruling(), -signal.SIGTERM)

    def _note_ends(self, worker_group: WorkerGroup) -> None:
        if not isinstance(self._pcontext, SubprocessContext):
            return
        failures = []
        for local_rank, handler in self._pcontext.subprocess_handlers.items():
            code, rank = handler.proc.poll(), worker_group.workers[local_rank].global_rank
            if code is not None:
                self.watch.note_exit(rank, code)
            if code:
                output = self.files.current.get(rank)
                failures.append((failure_time(output.err if output else None), rank, code))
        followers = self._read_failures([rank for _, rank, _ in failures])
        failures.sort(key=lambda failure: (failure[1] in followers, *failure))
        self.failed_first = [rank for _, rank, _ in failures]
        is_watched = bool(failures) and self.watch.has_sidecar()
        for at, rank, code in failures:
            frame = {"rank": rank, "code": code, "at": at, "restarts_left": self._remaining_restarts}
            start = self.files.num_starts - 1
            record = read_failure(self.files.failure_file(rank, start))
            known = {"follows": rank in followers, "error": record.error if record else ""}
            self.tell({"kind": "failed", "start": start, "is_watched": is_watched, **known, **frame})

    def _read_failures(self, ranks: Iterable[int]) -> set[int]:
        """Of ranks that have ended, those that only followed another. No restart is left where none can help."""
        start, followers = self.files.num_starts - 1, set()
        for rank in ranks:
            record = read_failure(self.files.failure_file(rank, start))
            if record is None:
                continue
            self._failure = record
            if record.rank != rank:
                followers.add(rank)
            if not record.can_restart or record.repeats(self._failure_before):
                self._remaining_restarts = 0
        return followers


def _world_size(worker_group: WorkerGroup) -> int:
    return worker_group.workers[0].world_size
