"""Calls that may never return, as to a file server that is down, run in daemon threads and have a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T]) -> Future[T]:
    """Start `call` at once; `result(timeout_s)` waits for it.

    The threads of an executor would keep the process from exiting; these do not."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
