"""torchrun's agent, which says when it starts ranks again, and does not when that cannot help."""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from drumline.errors import ExitCode


class LeftAsTold(Exception):  # noqa: N818  # no error
    """A signal told this node's ranks to leave, and they did."""

    def __init__(self, *, has_told: bool) -> None:
        super().__init__()
        self.has_told = has_told
        """Whether a rank was far enough to tell the user."""


class TellingAgent(LocalElasticAgent):
    """Ranks that end with one of `final_codes` would end so again: they are not started once more."""

    def __init__(self, *args: Any, final_codes: Collection[int], goes_on: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.final_codes = final_codes
        self.goes_on = goes_on
        """How a restarted rank begins, for the user to read."""
        self.told: signal.Signals | None = None
        """What this node's ranks were told to leave by."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids: dict[int, Any] = super()._start_workers(worker_group)
        signal.signal(signal.SIGUSR1, self._pass_on)
        return ids

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """SIGUSR1 before a time limit: the ranks finish and save in their own time. (torch passes SIGTERM on, and gives
        them 30 s.)"""
        self.told = signal.Signals(number)
        for rank in self._ranks():
            if rank.proc.poll() is None:
                rank.proc.send_signal(number)

    def _ranks(self) -> list[SubprocessHandler]:
        return list(getattr(self._pcontext, "subprocess_handlers", {}).values())

    def check_left_as_told(self, number: int, *, is_task: bool) -> None:
        """Raise LeftAsTold if all ranks ended as preempted. A task that has not begun does not catch the signal yet,
        and has nothing to save; a script that ends by it may well have."""
        codes = {rank.proc.poll() for rank in self._ranks()}
        as_told = {ExitCode.SUCCESS, ExitCode.PREEMPTED, *([-number] if is_task else [])}
        if codes <= as_told and codes != {ExitCode.SUCCESS}:
            raise LeftAsTold(has_told=ExitCode.PREEMPTED in codes)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if self._makes_room(result, worker_group):
            return RunResult(state=WorkerState.HEALTHY)  # torch starts them again, as nodes wait
        if result.is_failed() and (
            self.told or any(failure.exitcode in self.final_codes for failure in result.failures.values())
        ):
            self._remaining_restarts = 0
        return result

    def _makes_room(self, result: RunResult, worker_group: WorkerGroup) -> bool:
        """Whether the ranks saved and left because another node's agent ended its own, to let a waiting node in."""
        codes = {failure.exitcode for failure in result.failures.values()}
        is_waited_for = worker_group.spec.rdzv_handler.num_nodes_waiting
        return codes == {ExitCode.PREEMPTED} and not self.told and is_waited_for() > 0

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.told:
            raise LeftAsTold(has_told=False)
        done = worker_group.spec.max_restarts - self._remaining_restarts
        why = f"restart {done} of {worker_group.spec.max_restarts}" if done else "another node did so"
        print(f"drumline: starting the ranks again ({why}); {self.goes_on}", file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)
