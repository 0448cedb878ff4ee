"""A command that runs on a host in the background: its output in a file, its end, its signals."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.multinode import processes


class Job:
    """Made by `Host.start`. The process that we are parent of is nsenter; the command is its
    child."""

    def __init__(self, entry: subprocess.Popen[bytes], log: Path) -> None:
        self.entry = entry
        self.log = log

    def text(self) -> str:
        """All that it has written so far, to either stream."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code; minus the number of the signal that ended it."""
        try:
            return self.entry.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still runs after {timeout_s:g} s; it wrote:\n{self.text()}"
            ) from None

    def wait_for(self, words: str, timeout_s: float = 60.0) -> None:
        """Until it has written these words: faults are triggered by what a job says, never by a
        clock."""

        def said_or_ended() -> bool:
            return words in self.text() or self.entry.poll() is not None

        with suppress(AssertionError):
            processes.wait_until(said_or_ended, words, timeout_s=timeout_s)
        how = "still runs" if self.is_running() else f"ended with {self.entry.poll()}"
        assert words in self.text(), f"{how}, without {words!r}; it wrote:\n{self.text()}"

    def is_running(self) -> bool:
        return self.entry.poll() is None

    def send(self, number: signal.Signals) -> None:
        """To the command itself, not to what it has started."""
        processes.send(processes.children(self.entry.pid), number)


def end(entry: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kill the command, and let nsenter tell of it: it is nsenter that has to bury its child."""
    while entry.poll() is None:
        processes.send(processes.children(entry.pid), signal.SIGKILL)
        processes.send([entry.pid], signal.SIGCONT)
        time.sleep(0.01)
