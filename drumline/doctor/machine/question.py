"""A question to the machine that may never be answered (a dead file server, a name server that is away), asked in a
thread of its own: the doctor waits for it for a limited time, and then goes on without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Question(Generic[T]):
    """Asked at once; several are asked side by side, so that together they take as long as the slowest."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._answers: list[T] = []
        self._errors: list[Exception] = []
        # A daemon: whoever hangs in the kernel must not keep the doctor from ending.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def answer(self, timeout_s: float) -> T:
        """What was answered or raised; TimeoutError when that takes longer."""
        self._thread.join(timeout_s)
        if self._errors:
            raise self._errors[0]
        if not self._answers:
            raise TimeoutError(f"no answer within {timeout_s:.2g} s")
        return self._answers[0]

    def _run(self) -> None:
        try:
            self._answers.append(self._ask())
        except Exception as error:
            self._errors.append(error)
