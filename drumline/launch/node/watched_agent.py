"""The agent of a node under supervision: ranks write to files of their own, and who failed first is told at once."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import LogsDest, SubprocessContext

from drumline.launch.node.leaving_agent import LeavingAgent
from drumline.launch.node.supervision import RankOutput, Supervision, failure_time, rank_output


class RankFiles(LogsSpecs):
    """Where ranks write. torch's own names files by the node's own numbers, and empties those of an earlier start."""

    def __init__(self, scratch: str, folder: Path | None) -> None:
        super().__init__(scratch, Std.NONE, Std.NONE)
        self.scratch = Path(scratch)
        self.folder = folder
        self.num_starts = 0
        self.current: dict[int, RankOutput] = {}
        """By global rank."""

    @property
    def root_log_dir(self) -> str:
        return str(self.folder or self.scratch)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        start, self.num_starts = self.num_starts, self.num_starts + 1
        self.current = {}
        dest = LogsDest()
        for local_rank, variables in envs.items():
            rank = int(variables["RANK"])
            error_file = self.scratch / f"error-{rank}-{start}.json"
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

    def __init__(self, *args: Any, supervision: Supervision, scratch: str, **kwargs: Any) -> None:
        self.files = RankFiles(scratch, supervision.folder)
        # torch 2.11 takes 30 s whatever is wished; who waits for less kills the rest.
        if "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters:
            kwargs["shutdown_timeout"] = max(1, round(supervision.grace_s))
        super().__init__(*args, logs_specs=self.files, **kwargs)
        self.tell = supervision.tell
        self.failed_first: list[int] = []
        """Global ranks, the first one first; those that the agent ended itself are not among them."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.failed_first = []
        ids: dict[int, Any] = super()._start_workers(worker_group)
        start = self.files.num_starts - 1
        ranks = [worker.global_rank for worker in worker_group.workers]
        self.tell(
            {"kind": "started", "ranks": ranks, "world_size": _world_size(worker_group), "start": start}
        )
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._note_failures(worker_group)
        result = super()._monitor_workers(worker_group)
        if self.failed_first and result.is_failed():
            result.failures = {rank: result.failures[rank] for rank in self.failed_first}
        return result

    def _note_failures(self, worker_group: WorkerGroup) -> None:
        if not isinstance(self._pcontext, SubprocessContext):
            return
        failures = []
        for local_rank, handler in self._pcontext.subprocess_handlers.items():
            if code := handler.proc.poll():
                rank = worker_group.workers[local_rank].global_rank
                output = self.files.current.get(rank)
                failures.append((failure_time(output.err if output else None), rank, code))
        self.failed_first = [rank for _, rank, _ in sorted(failures)]
        for at, rank, code in sorted(failures):
            frame = {"rank": rank, "code": code, "at": at, "restarts_left": self._remaining_restarts}
            self.tell({"kind": "failed", "start": self.files.num_starts - 1, **frame})


def _world_size(worker_group: WorkerGroup) -> int:
    return worker_group.workers[0].world_size
