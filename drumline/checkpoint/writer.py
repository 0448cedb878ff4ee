"""The thread that writes a checkpoint while training goes on: one piece of work at a time.

The training thread looks at `has_news` after each step and at nothing else; there is no lock between the two. What the
work came to, an error too, waits here until it is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Writer(Generic[Result]):
    """Works beside the thread that has it."""

    def __init__(self) -> None:
        self.has_news = False
        """Whether a piece of work is done that nobody has taken."""
        self._thread: threading.Thread | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a piece of work is in hand."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def start(self, work: Callable[[], Result]) -> None:
        """Begin a piece of work; the one before must have been taken."""
        assert self._thread is None
        # Not a daemon: a process that comes to its end by itself ends with a whole checkpoint.
        self._thread = threading.Thread(target=self._run, args=(work,), name="drumline-checkpoint")
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the work in hand is done; whether it is. Any thread may wait."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)
        return not self.is_busy

    def take(self) -> Result | None:
        """What the work came to: its result once, or its error; None: there was none. Waits for it."""
        self.wait()
        result, error = self._result, self._error
        self._thread = self._result = self._error = None
        self.has_news = False
        if error is not None:
            raise error
        return result

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._error = error
        self.has_news = True
