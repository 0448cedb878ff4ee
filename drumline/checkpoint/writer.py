"""The thread that writes a checkpoint while training continues: one job at a time.

The training thread reads `has_news` after each step and nothing else; there is no lock between the two. The result, or
the error, is kept here until it is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Writer(Generic[Result]):
    def __init__(self) -> None:
        self.has_news = False
        """Whether there is a result that has not been taken."""
        self._thread: threading.Thread | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive()

    def start(self, work: Callable[[], Result]) -> None:
        """Start a job; the result of the one before must have been taken."""
        assert self._thread is None
        # Not a daemon: a process that ends by itself first completes the checkpoint.
        self._thread = threading.Thread(target=self._run, args=(work,), name="drumline-checkpoint")
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the job is done; False: it is still running after that time. Any thread may wait."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)
        return not self.is_busy

    def take(self) -> Result | None:
        """Wait for the job and return its result, or raise its error; None: there was no job."""
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
