"""Every way runs in a thread of its own, and only while it is asked for steps.

Lightning's `Trainer.fit` and our own `train()` run from the first step to the last and will not be driven from outside.
Given `pass_on` to call after each step, they stand still there until more are wanted. Others do the same, so that all
have what belongs to a thread to themselves: the current CUDA stream above all. Only one thread runs at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# A compiler recurses deeply, and a thread's stack does not grow as the main thread's does.
STACK_BYTES = 256 << 20
PassOn = Callable[[int], None]
"""To be called after each step with the number of its samples."""


class Enough(BaseException):
    """Ends a loop where it stands. No Exception: nobody is to take it for a failure of the run."""


class Baton:
    """Goes from who wants steps to who takes them, and back."""

    def __init__(self, run: Callable[[PassOn], object]) -> None:
        self._run = run
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._wanted = self._samples = 0
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._in_thread, daemon=True)

    def take(self, steps: int) -> int:
        """Let so many steps be taken; returns how many samples they had."""
        if not self._thread.is_alive():
            before = threading.stack_size(STACK_BYTES)
            self._thread.start()
            threading.stack_size(before)
        self._wanted, self._samples = steps, 0
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

    def _pass_on(self, samples: int) -> None:
        self._samples += samples
        self._wanted -= 1
        if self._wanted > 0:
            return
        self._done.release()
        self._go.acquire()
        if self._is_over:
            raise Enough

    def _in_thread(self) -> None:
        self._go.acquire()
        try:
            self._run(self._pass_on)
            self._error = RuntimeError("the loop came to its end before enough steps were taken")
        except Enough:
            return
        except BaseException as error:
            self._error = error
        self._done.release()
