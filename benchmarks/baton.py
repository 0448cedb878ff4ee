"""A loop that will not be driven from outside becomes an iterator: it runs in a thread of its own, and only while it is
asked for a step.

Lightning's `Trainer.fit` and our own `train()` run from the first step to the last. Given `pass_on` to call after each
step, they stand still there until the next one is wanted. Only one thread runs at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator


class Enough(BaseException):
    """Ends the loop where it stands. No Exception: nobody is to take it for a failure of the run."""


class Baton:
    """Goes from who wants a step to who takes it, and back."""

    def __init__(self, run: Callable[[Baton], object]) -> None:
        self._run = run
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._samples = 0
        self._is_over = False
        self._error: BaseException | None = None

    def pass_on(self, samples: int) -> None:
        """For the loop: a step was taken. Returns when the next one is wanted."""
        self._samples = samples
        self._done.release()
        self._go.acquire()
        if self._is_over:
            raise Enough

    def steps(self) -> Iterator[int]:
        thread = threading.Thread(target=self._in_thread, daemon=True)
        thread.start()
        try:
            while True:
                self._go.release()
                self._done.acquire()
                if self._error is not None:
                    raise self._error
                yield self._samples
        finally:
            self._is_over = True
            self._go.release()
            thread.join(timeout=60)

    def _in_thread(self) -> None:
        self._go.acquire()
        try:
            self._run(self)
            self._error = RuntimeError("the loop came to its end before enough steps were taken")
        except Enough:
            pass
        except BaseException as error:
            self._error = error
        self._done.release()
