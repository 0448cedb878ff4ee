"""What names lead to, as this host sees it. Many at once: one that nobody answers for takes seconds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

# The resolver's own patience is 5 s a try and more; nobody who starts a job waits that long for a name.
LIMIT_S = 3.0


def resolve_all(names: Iterable[str], *, limit_s: float = LIMIT_S) -> dict[str, dict[str, Any]]:
    """For each name `{"addresses": [...]}`, or `{"error": why not}`. IPv4, as gloo, NCCL and torchrun use it here."""
    found: dict[str, dict[str, Any]] = {}

    def resolve(name: str) -> None:
        found[name] = _resolve(name)

    # The resolver cannot be interrupted; threads that hang in it are left behind.
    threads = {name: threading.Thread(target=resolve, args=[name], daemon=True) for name in set(names)}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    silent = {"error": f"the resolver has not answered within {limit_s:g} s"}
    return {name: dict(found.get(name, silent)) for name in threads}


def _resolve(name: str) -> dict[str, Any]:
    try:
        answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return {"error": str(getattr(error, "strerror", None) or error)}
    return {"addresses": list(dict.fromkeys(str(answer[4][0]) for answer in answers))}
