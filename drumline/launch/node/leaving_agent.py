"""The agent's part in leaving by a signal: SIGUSR1 reaches the ranks, and ranks that have left are not started again.

torch passes SIGTERM on itself, and gives the ranks some seconds. What the ranks do then: `engine/preemption.py`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from drumline.errors import DrumlineError, ExitCode
from drumline.launch.interrupts import ENDING_SIGNALS
from drumline.launch.node.agent import TellingAgent
from drumline.launch.node.rendezvous import FixedRanks

# A shell, a scheduler or `timeout` may send one signal twice.
SAME_SIGNAL_S = 1.0


class LeftAsTold(Exception):  # noqa: N818  # no error
    """A signal told this node's ranks to leave, and they did."""

    def __init__(self, *, has_told: bool) -> None:
        super().__init__()
        self.has_told = has_told
        """Whether a rank was far enough to tell the user."""


class LeavingAgent(TellingAgent):
    """`is_task`: the ranks are ours, and mean by 75 that they were told to leave; a script may mean anything."""

    def __init__(self, *args: Any, is_task: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_task = is_task
        self.told: signal.Signals | None = None
        """What this node's ranks were told to leave by."""
        self._caught_by: set[int] = set()
        """Processes of ranks that had a handler for it when it was sent."""
        self._asked_to_end: signal.Signals | None = None
        self._asked_at = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.told:  # while the nodes met again
            raise LeftAsTold(has_told=False)
        ids: dict[int, Any] = super()._start_workers(worker_group)
        signal.signal(signal.SIGUSR1, self._pass_on)
        for number in ENDING_SIGNALS:
            # Only where torch has set its own: the others are ignored.
            if signal.getsignal(number) is _terminate_process_handler:
                signal.signal(number, self._end)
        if self.told:  # while these were being started, so to those before them
            self._pass_on(self.told, None)
        return ids

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The ranks finish and save in their own time: who sends this sends it before a time limit. A scheduler may
        have sent it to the ranks, too: a script that does not catch it has nothing to save, or is about to exit."""
        self.told = signal.Signals(number)
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, FixedRanks):
            handler.is_leaving = True
        for rank in self._ranks():
            if _catches(rank.proc.pid, self.told):
                self._caught_by.add(rank.proc.pid)
            if rank.proc.poll() is None and (self.is_task or rank.proc.pid in self._caught_by):
                rank.proc.send_signal(number)

    def _end(self, number: int, frame: FrameType | None) -> None:
        """As torch's own handler, but what the main thread drops where it happens to be is raised again."""
        if self._asked_to_end is not None:
            if time.monotonic() - self._asked_at > SAME_SIGNAL_S:  # the guard does the rest
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._asked_to_end, self._asked_at = signal.Signals(number), time.monotonic()
        self._raise_if_asked()

    def _raise_if_asked(self) -> None:
        if self._asked_to_end is not None:
            raise SignalException(f"told to end by {self._asked_to_end.name}", sigval=self._asked_to_end)

    def _ranks(self) -> list[SubprocessHandler]:
        return list(getattr(self._pcontext, "subprocess_handlers", {}).values())

    def _codes(self) -> set[int | None]:
        """How the ranks ended. Python gives a signal its default action back as it exits, so one that was caught and
        then ended the rank came a second time, to a rank that was leaving."""
        return {
            ExitCode.PREEMPTED
            if self.told and code == -self.told and rank.proc.pid in self._caught_by
            else code
            for rank in self._ranks()
            for code in [rank.proc.poll()]
        }

    def check_left_as_told(self, number: int | None) -> None:
        """After a run: raise LeftAsTold if all ranks ended as preempted, told by this signal. A task that has not begun
        does not catch it yet, and has nothing to save; a script that is ended by it may well have."""
        if number not in (signal.SIGTERM, signal.SIGUSR1):
            return  # Ctrl-C asks for no save
        codes = self._codes()
        as_told = {ExitCode.SUCCESS, ExitCode.PREEMPTED, *([-number] if self.is_task else [])}
        if codes <= as_told and codes != {ExitCode.SUCCESS}:
            raise LeftAsTold(has_told=ExitCode.PREEMPTED in codes)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._raise_if_asked()
        if self.told and self._are_leaving():
            return RunResult(state=WorkerState.HEALTHY)  # torch would end those that still save
        result: RunResult = super()._monitor_workers(worker_group)
        if not self.told and self.has_left(result) and self._makes_room(worker_group):
            self._failed = False
            return RunResult(state=WorkerState.HEALTHY)  # torch starts them again, as a node waits
        codes = {failure.exitcode for failure in result.failures.values()}
        if result.is_failed() and (self.told or (self.is_task and ExitCode.PREEMPTED in codes)):
            self._remaining_restarts = 0
        return result

    def has_left(self, result: RunResult) -> bool:
        """Whether the ranks left, told on another node, with all saved."""
        codes = {failure.exitcode for failure in result.failures.values()}
        return self.is_task and codes == {ExitCode.PREEMPTED}

    def _are_leaving(self) -> bool:
        codes = self._codes()
        return None in codes and codes <= {None, ExitCode.SUCCESS, ExitCode.PREEMPTED}

    def _makes_room(self, worker_group: WorkerGroup) -> bool:
        """Whether the ranks left because another node's agent has ended its own, to let a node in that waits."""
        with contextlib.suppress(DrumlineError):  # the first node may have left already
            return worker_group.spec.rdzv_handler.num_nodes_waiting() > 0
        return False

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        """Ctrl-C ends a rank of a task that has not begun by SIGTERM: Python, as it starts, shows a traceback for the
        other, or drops it."""
        if death_sig == signal.SIGINT and self.is_task:
            for rank in self._ranks():
                if not _catches(rank.proc.pid, signal.SIGTERM):
                    rank.proc.terminate()
        super()._shutdown(death_sig, *args, **kwargs)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """By SIGTERM, which lets ranks save before a node is let in. Without those of a lost node they could not."""
        handler = worker_group.spec.rdzv_handler
        if self.is_task and isinstance(handler, FixedRanks) and handler.has_lost:
            self._shutdown(signal.SIGKILL)
        else:
            super()._stop_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.told:
            raise LeftAsTold(has_told=False)
        super()._restart_workers(worker_group)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for it; a rank of ours has one for SIGTERM when its imports are done."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    caught = next((line for line in lines if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
