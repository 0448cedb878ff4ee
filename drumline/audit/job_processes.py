"""Starts a job and ends all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from drumline.audit.end_with_parent import ending_with_parent
from drumline.processes import descendants, read_stat

GRACE_S = 10.0


class JobProcesses:
    """A running command and all that it starts; none of it outlives the context."""

    def __init__(self, command: Sequence[str], *, log: Path) -> None:
        with log.open("wb") as file:
            # A session of its own: a Ctrl-C reaches only this process, which then ends the job in order.
            self._root = subprocess.Popen(
                ending_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._known: dict[int, int] = {}
        """By pid, when it was started: pids are reused."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._root.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._root.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code; None when it still runs after that time."""
        with suppress(subprocess.TimeoutExpired):
            return self._root.wait(timeout_s)
        return None

    def kill(self, pids: Sequence[int]) -> None:
        """End some of its processes with SIGKILL."""
        # What a killed rank has started outlives it; `end` ends it.
        self._note_descendants()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End what is left; first by SIGTERM, on which torchrun's agent ends its ranks."""
        if self._root.poll() is None:
            self._note_descendants()
            self._root.terminate()
            if self.wait(GRACE_S) is None:
                self._note_descendants()
                self._root.kill()
                self._root.wait()
        for pid, start_ticks in self._known.items():
            if (stat := read_stat(pid)) is not None and stat.start_ticks == start_ticks:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _note_descendants(self) -> None:
        for pid in descendants(self._root.pid):
            if (stat := read_stat(pid)) is not None:
                self._known[pid] = stat.start_ticks
