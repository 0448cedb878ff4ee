"""What an agent exchanges with its ranks: files for their output, their failures, and that they have
saved; and signals.

SIGUSR1 is passed on to the ranks. SIGTERM raises torch's SignalException, with which torch's agent
passes it on; one that the main thread dropped is raised again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.api import LogsDest

from drumline.base import rank_environment
from drumline.base.errors import ExitCode
from drumline.base.processes import has_signal, read_status
from drumline.base.rank_environment import FailureRecord, read_failure
from drumline.base.startup import ENDING_SIGNALS, SAME_SIGNAL_S
from drumline.launch.node.node_rendezvous import AgentRendezvous, Preempted
from drumline.launch.node.rank_logs import rank_file, rank_output
from drumline.rank.torch_internals import is_terminating_handler


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
        """What torch shows in its own messages."""
        return str(self.folder or self.scratch)

    def failures(self, ranks: Iterable[int]) -> dict[int, FailureRecord]:
        """The records of these ranks, where they could write one in this start."""
        records = {rank: read_failure(self._failure_file(rank)) for rank in ranks}
        return {rank: record for rank, record in records.items() if record is not None}

    def _failure_file(self, rank: int) -> Path:
        """Of that rank in this start."""
        return self.scratch / f"failure-{rank}-{self.num_starts - 1}.json"

    def reports_save(self, rank: int) -> bool:
        """Whether this rank was preempted in this start, and has reported that the run has
        saved."""
        return self._saved_file(rank).exists()

    def _saved_file(self, rank: int) -> Path:
        """Of that rank in this start."""
        return self.scratch / f"saved-{rank}-{self.num_starts - 1}"

    def stderr(self, rank: int) -> Path | None:
        """The stderr file of that rank in this start; None: it writes to the screen."""
        if self.folder is None:
            return None

        _, stderr = rank_output(self.folder, rank, self.num_starts - 1)
        return stderr

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """torch's hook at each start: complete the environment of every rank, and name its
        files."""
        start = self.num_starts
        self.num_starts += 1
        dest = LogsDest()
        for local_rank, variables in envs.items():
            rank = int(variables["RANK"])
            error_file = str(self.scratch / f"error-{rank}-{start}.json")

            variables.update(self.variables)
            variables["TORCHELASTIC_ERROR_FILE"] = error_file
            variables[rank_environment.FAILURE_FILE] = str(self._failure_file(rank))
            variables[rank_environment.SAVED_FILE] = str(self._saved_file(rank))

            dest.error_files[local_rank] = error_file
            # An empty name does not redirect the stream.
            dest.stdouts[local_rank] = ""
            dest.stderrs[local_rank] = ""
            if self.folder is not None:
                stdout, stderr = rank_output(self.folder, rank, start)
                # An earlier launch with the same --logs may have left one.
                number_file = rank_file(self.folder, rank, start)
                number_file.unlink(missing_ok=True)
                variables[rank_environment.RANK_FILE] = str(number_file)
                dest.stdouts[local_rank] = str(stdout)
                dest.stderrs[local_rank] = str(stderr)

        dest.filtered_stdout = str(self.scratch / "filtered")
        dest.filtered_stderr = dest.filtered_stdout
        return dest


# Signals


class RankSignals:
    """Passes signals on to the ranks of this node, and tells how they ended after one."""

    def __init__(
        self,
        rank_processes: Callable[[], Iterable[Popen[Any]]],
        rendezvous: AgentRendezvous,
        *,
        is_task: bool,
    ) -> None:
        """`is_task`: the ranks are ours, so exit code 75 means preempted; in a script it may mean
        anything."""
        self.preempt_signal: signal.Signals | None = None
        """The signal that asked this node's ranks to stop."""
        self._rank_processes = rank_processes
        self._rendezvous = rendezvous
        self._is_task = is_task
        self._caught_by: set[int] = set()
        """Processes of ranks that had a handler for the preempt signal when it was sent."""
        self._end_signal: signal.Signals | None = None
        self._end_signal_at = 0.0

    def set_handlers(self) -> None:
        """After each start, in which torch sets its own."""
        signal.signal(signal.SIGUSR1, self._preempt)
        for number in ENDING_SIGNALS:
            # Only for signals that torch handles: the others are ignored.
            if is_terminating_handler(signal.getsignal(number)):
                signal.signal(number, self._end)

        # it came while ranks were being started, so some did not get it
        if self.preempt_signal:
            self._preempt(self.preempt_signal, None)

    def _preempt(self, number: int, frame: FrameType | None) -> None:
        """Ask the ranks to save and exit, without a time limit: the sender has one. A scheduler may
        have sent the signal to the ranks, too: a script without a handler has nothing to save, or
        is about to exit."""
        self.preempt_signal = signal.Signals(number)
        self._rendezvous.is_leaving = True
        for process in self._rank_processes():
            if _catches(process.pid, self.preempt_signal):
                self._caught_by.add(process.pid)
            may_save = self._is_task or process.pid in self._caught_by
            if process.poll() is None and may_save:
                process.send_signal(number)

    def _end(self, number: int, frame: FrameType | None) -> None:
        """As torch's own handler, with which its agent ends the ranks; if the main thread drops the
        exception, it is raised again."""
        if self._end_signal is not None:
            # the guard does the rest
            if time.monotonic() - self._end_signal_at > SAME_SIGNAL_S:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return

        self._end_signal = signal.Signals(number)
        self._end_signal_at = time.monotonic()
        self.raise_end_signal()

    def raise_end_signal(self) -> None:
        """If one came, have torch's agent end the ranks."""
        if self._end_signal is not None:
            raise SignalException(f"ended by {self._end_signal.name}", sigval=self._end_signal)

    def raise_if_asked_to_stop(self) -> None:
        """Before ranks are started."""
        if self.preempt_signal:
            raise Preempted(was_reported=False)

    def raise_if_ranks_stopped(self, number: int | None, *, is_save_reported: bool) -> None:
        """After a run: raise Preempted if it has saved, or if all ranks stopped because of this
        signal. `is_save_reported`: a rank of this node has reported that the preempted run has
        saved."""
        if self._is_task and is_save_reported:
            was_signalled = number is not None
            raise Preempted(was_reported=True, was_signalled=was_signalled, has_saved=True)
        if number not in (signal.SIGTERM, signal.SIGUSR1):
            return  # Ctrl-C does not ask for a save

        codes = self._exit_codes()
        allowed: set[int | None] = {ExitCode.SUCCESS, ExitCode.PREEMPTED}
        if self._is_task:
            # One that has not begun has no handler yet, and nothing to save; a script may have
            # something.
            allowed.add(-number)

        if codes <= allowed and codes != {ExitCode.SUCCESS}:
            raise Preempted(was_reported=ExitCode.PREEMPTED in codes)

    def are_ranks_saving(self) -> bool:
        """Whether ranks that were asked to stop still run, and none of them has failed."""
        if not self.preempt_signal:
            return False
        codes = self._exit_codes()
        return None in codes and codes <= {None, ExitCode.SUCCESS, ExitCode.PREEMPTED}

    def _exit_codes(self) -> set[int | None]:
        """Of all ranks here; None: one runs."""
        return {self._exit_code(process) for process in self._rank_processes()}

    def _exit_code(self, process: Popen[Any]) -> int | None:
        """Python resets signal handlers when it exits: a rank that had a handler for the signal and
        was killed by it received it a second time, while it was exiting."""
        code = process.poll()
        if self.preempt_signal and code == -self.preempt_signal and process.pid in self._caught_by:
            return ExitCode.PREEMPTED
        return code

    def terminate_loading_ranks(self) -> None:
        """After Ctrl-C, a task's rank that has not begun gets SIGTERM: on SIGINT Python would show
        a traceback."""
        for process in self._rank_processes():
            if not _catches(process.pid, signal.SIGTERM):
                process.terminate()


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for this signal; our ranks have one for SIGTERM after their
    imports."""
    return has_signal(read_status(pid), "SigCgt", number)
