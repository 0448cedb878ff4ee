"""Runs a training loop in its own thread, paused between blocks of steps.

Lightning's `Trainer.fit` and our own `train()` run from the first step to the last and cannot be
driven from outside. They call `after_step` after each step, which blocks until more steps are
wanted. All loops do the same, so that each has its own thread state, above all its own current CUDA
stream. Only one thread runs at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# torch.compile recurses deeply, and a thread's stack does not grow like the main thread's.
STACK_BYTES = 256 << 20
AfterStep = Callable[[int], None]
"""Called after each step with the number of its samples."""


class LoopClosed(BaseException):
    """Ends a paused loop. Not an Exception, so that the loop does not handle it as a failure."""


class PausedLoop:
    """A loop that takes steps only when `take` asks for them."""

    def __init__(self, run: Callable[[AfterStep], object]) -> None:
        self._run = run
        self._go = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._wanted = self._samples = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._in_thread, daemon=True)

    def take(self, steps: int) -> int:
        """Take this many steps; returns how many samples they had."""
        if not self._thread.is_alive():
            before = threading.stack_size(STACK_BYTES)
            self._thread.start()
            threading.stack_size(before)
        self._wanted = steps
        self._samples = 0
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._samples

    def close(self) -> None:
        self._is_over = True
        self._go.release()
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    def _after_step(self, samples: int) -> None:
        self._samples += samples
        self._wanted -= 1
        if self._wanted > 0:
            return
        self._done.release()
        self._go.acquire()
        if self._is_over:
            raise LoopClosed

    def _in_thread(self) -> None:
        self._go.acquire()
        try:
            self._run(self._after_step)
            self._error = RuntimeError("the loop ended before enough steps were taken")
        except LoopClosed:
            return
        except BaseException as error:
            self._error = error
        self._done.release()
