"""Signals, heard by a thread over a pipe that the system writes to at once.

Python runs a signal's handler when its main thread comes back from what it does, which in a collective may be never.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any


class SignalPipe:
    """From `__init__` to `close`, both in the main thread, these signals do nothing but arrive here."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_open = True
        signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {}
        for number in signals:
            self._before[number] = signal.signal(number, _heard_elsewhere)
            signal.siginterrupt(number, False)
        os.register_at_fork(after_in_child=self._forget)

    def wait(self, timeout_s: float) -> list[int]:
        """The signals that came, at the latest after this time."""
        if not select.select([self._out], [], [], timeout_s)[0]:
            return []
        return [number for number in os.read(self._out, 256) if number in self._before]

    def wake(self) -> None:
        """End a `wait` in another thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._in, b"\0")

    def close(self, *, stay_deaf: bool) -> None:
        """Nobody waits any more. `stay_deaf`: the signals go on to do nothing; otherwise they do what they did."""
        self._is_open = False
        signal.set_wakeup_fd(-1)
        if not stay_deaf:
            self._restore()
        os.close(self._in)
        os.close(self._out)

    def _forget(self) -> None:
        """In a forked child (a DataLoader worker), which shares the pipe: signals to it are not meant for the run."""
        if self._is_open:
            signal.set_wakeup_fd(-1)
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _heard_elsewhere(number: int, frame: FrameType | None) -> None:
    """Only signals that have a handler are written to the pipe."""
