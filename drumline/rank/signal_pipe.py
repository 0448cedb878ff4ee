"""Signals, received by a thread over a pipe.

Python runs a signal handler only when its main thread returns to the interpreter, which may never
happen in a collective; the pipe is written at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from typing import Any


class SignalPipe:
    """From `__init__` to `close`, both in the main thread, these signals have no other effect."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_open = True
        signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {}
        for number in signals:
            # Only signals that have a handler are written to the pipe.
            self._before[number] = signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
        os.register_at_fork(after_in_child=self._restore_in_child)

    def wait(self, timeout_s: float) -> list[int]:
        """The signals that arrived, at the latest after this time."""
        if not select.select([self._out], [], [], timeout_s)[0]:
            return []
        return [number for number in os.read(self._out, 256) if number in self._before]

    def wake(self) -> None:
        """End a `wait` in another thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._in, b"\0")

    def close(self, *, restore: bool) -> None:
        """`restore` the earlier handlers; otherwise the signals are ignored from now on."""
        self._is_open = False
        signal.set_wakeup_fd(-1)
        if restore:
            self._restore()
        os.close(self._in)
        os.close(self._out)

    def _restore_in_child(self) -> None:
        """A forked child (a DataLoader worker) shares the pipe, but signals to it must not stop the
        run."""
        if self._is_open:
            signal.set_wakeup_fd(-1)
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
