"""torchrun's agent with our handling of signals: SIGUSR1 is passed on to the ranks (torch passes on
SIGTERM), and an exception that the main thread dropped is raised again."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from drumline.base.errors import ExitCode
from drumline.base.processes import has_signal, read_status
from drumline.base.startup import ENDING_SIGNALS, SAME_SIGNAL_S
from drumline.launch.node.node_rendezvous import NodeRendezvous
from drumline.launch.node.open_rendezvous import SingleNodeRendezvous


class Preempted(Exception):  # noqa: N818  # no error
    """A signal asked this node's ranks to stop, and they did."""

    def __init__(self, *, was_reported: bool, was_signalled: bool = True) -> None:
        super().__init__()
        self.was_reported = was_reported
        """Whether a rank has reported it."""
        self.was_signalled = was_signalled
        """Whether the signal was sent to this process; otherwise a rank got it, or a notice."""


class SignalledAgent(LocalElasticAgent):
    """`is_task`: the ranks are ours, so exit code 75 means preempted; in a script it may mean
    anything."""

    rendezvous: SingleNodeRendezvous | NodeRendezvous
    is_task: bool
    preempt_signal: signal.Signals | None = None
    """The signal that asked this node's ranks to stop."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._caught_by: set[int] = set()
        """Processes of ranks that had a handler for the preempt signal when it was sent."""
        self._end_signal: signal.Signals | None = None
        self._end_signal_at = 0.0

    def set_handlers(self) -> None:
        signal.signal(signal.SIGUSR1, self._preempt)
        for number in ENDING_SIGNALS:
            # Only for signals that torch handles: the others are ignored.
            if signal.getsignal(number) is _terminate_process_handler:
                signal.signal(number, self._end)
        if self.preempt_signal:  # it came while ranks were being started, so some did not get it
            self._preempt(self.preempt_signal, None)

    def _preempt(self, number: int, frame: FrameType | None) -> None:
        """Ask the ranks to save and exit, without a time limit: the sender has one. A scheduler may
        have sent the signal to the ranks, too: a script without a handler has nothing to save, or
        is about to exit."""
        self.preempt_signal = signal.Signals(number)
        self.rendezvous.is_leaving = True
        for rank in self._handlers().values():
            if _catches(rank.proc.pid, self.preempt_signal):
                self._caught_by.add(rank.proc.pid)
            if rank.proc.poll() is None and (self.is_task or rank.proc.pid in self._caught_by):
                rank.proc.send_signal(number)

    def _end(self, number: int, frame: FrameType | None) -> None:
        """As torch's own handler; but if the main thread drops the exception, it is raised
        again."""
        if self._end_signal is not None:
            if time.monotonic() - self._end_signal_at > SAME_SIGNAL_S:  # the guard does the rest
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self._end_signal = signal.Signals(number)
        self._end_signal_at = time.monotonic()
        self.raise_end_signal()

    def raise_end_signal(self) -> None:
        if self._end_signal is not None:
            raise SignalException(f"ended by {self._end_signal.name}", sigval=self._end_signal)

    def check_preempted(self, number: int | None) -> None:
        """After a run: raise Preempted if it has saved, or if all ranks stopped because of this
        signal."""
        if self.is_task and self.has_reported_save():
            raise Preempted(was_reported=True, was_signalled=number is not None)
        if number not in (signal.SIGTERM, signal.SIGUSR1):
            return  # Ctrl-C does not ask for a save
        codes = self.exit_codes()
        # A task that has not begun has no handler yet, and nothing to save; a script may have
        # something.
        allowed = {ExitCode.SUCCESS, ExitCode.PREEMPTED, *([-number] if self.is_task else [])}
        if codes <= allowed and codes != {ExitCode.SUCCESS}:
            raise Preempted(was_reported=ExitCode.PREEMPTED in codes)

    def exit_codes(self) -> set[int | None]:
        """The ranks' exit codes. Python resets signal handlers when it exits: a rank that had a
        handler for the signal and was killed by it received it a second time, while it was
        exiting."""
        return {
            ExitCode.PREEMPTED
            if self.preempt_signal
            and code == -self.preempt_signal
            and rank.proc.pid in self._caught_by
            else code
            for rank in self._handlers().values()
            for code in [rank.proc.poll()]
        }

    def has_reported_save(self) -> bool:
        """Whether a rank of this node has reported that the preempted run has saved."""
        raise NotImplementedError

    def codes(self) -> dict[int, int | None]:
        """The ranks' exit codes by local rank; None: it runs."""
        return {local_rank: rank.proc.poll() for local_rank, rank in self._handlers().items()}

    def _handlers(self) -> dict[int, SubprocessHandler]:
        """The processes of the ranks, by local rank."""
        return dict(getattr(self._pcontext, "subprocess_handlers", {}))

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any
    ) -> None:
        """After Ctrl-C, a task's rank that has not begun gets SIGTERM: on SIGINT Python would show
        a traceback."""
        if death_sig == signal.SIGINT and self.is_task:
            for rank in self._handlers().values():
                if not _catches(rank.proc.pid, signal.SIGTERM):
                    rank.proc.terminate()
        super()._shutdown(death_sig, *args, **kwargs)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for this signal; our ranks have one for SIGTERM after their
    imports."""
    return has_signal(read_status(pid), "SigCgt", number)
