"""Runs calls that may never return, to a server of files, objects or names that is down, in daemon
threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T], *, name: str | None = None) -> Future[T]:
    """Start `call` at once; `result(timeout_s)` waits for it.

    The threads of an executor would keep the process from exiting; these do not."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def resolve_ipv4(name: str) -> list[str]:
    """Its addresses, resolved as gloo, NCCL and torchrun do; OSError when it does not resolve."""
    answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def resolve_all(names: Iterable[str], *, limit_s: float) -> dict[str, dict[str, Any]]:
    """For each name its `addresses` or an `error`."""
    # The resolver cannot be interrupted; threads that hang in it are abandoned.
    resolving = {name: in_background(partial(resolve_ipv4, name)) for name in names}
    deadline = time.monotonic() + limit_s
    answers: dict[str, dict[str, Any]] = {}

    for name, answer in resolving.items():
        try:
            answers[name] = {"addresses": answer.result(max(0.0, deadline - time.monotonic()))}
        except TimeoutError:
            answers[name] = {"error": f"the resolver did not answer within {limit_s:g} s"}
        except (OSError, UnicodeError) as error:
            answers[name] = {"error": str(getattr(error, "strerror", None) or error)}

    return answers
