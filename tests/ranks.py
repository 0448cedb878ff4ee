"""Runs a function on several real ranks: processes with torchrun's variables, from a server that
has torch loaded.

A rank forked from that server starts in milliseconds; a rank that imports torch itself would take
seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

server_context = multiprocessing.get_context("forkserver")
server_context.set_forkserver_preload(["tests.preloaded"])


class RanksFailed(AssertionError):
    """Some ranks raised or never answered; `errors` has each one's traceback."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__(
            "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items()))
        )


def free_port() -> int:
    """One that nobody listens on, below those that the system hands out: it may not give this one
    away meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 150.0,
    context: Any = server_context,
) -> list[Any]:
    """`function(*args)` on every rank of a world; what each returned, by rank. `context`: how
    processes start, if not from the server."""
    port = free_port()
    pipes: dict[int, Connection] = {}
    processes = []
    for rank in range(world_size):
        mine, theirs = context.Pipe(duplex=False)
        environment = rank_environment(rank, world_size, port)
        process = context.Process(target=_run_rank, args=(theirs, environment, function, args))
        process.start()
        theirs.close()
        pipes[rank] = mine
        processes.append(process)
    try:
        return _collect(pipes, [process.sentinel for process in processes], timeout_s)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _collect(pipes: dict[int, Connection], sentinels: list[int], timeout_s: float) -> list[Any]:
    """What ranks send. Workers that a killed rank has forked hold its end of the pipe for seconds;
    its sentinel they do not."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    waiting = dict(pipes)
    while waiting and time.monotonic() < deadline:
        ready = wait([*waiting.values(), *(sentinels[rank] for rank in waiting)], timeout=0.5)
        for rank, pipe in list(waiting.items()):
            if pipe in ready or sentinels[rank] in ready:
                succeeded = False
                value = "the process ended without a word"
                with contextlib.suppress(EOFError):
                    if pipe.poll():
                        succeeded, value = pipe.recv()
                (results if succeeded else errors)[rank] = value
                del waiting[rank]
    errors.update(dict.fromkeys(waiting, f"no answer within {timeout_s:g} s"))
    for pipe in pipes.values():
        pipe.close()
    if errors:
        raise RanksFailed(errors)
    return [results[rank] for rank in sorted(results)]


def _run_rank(
    pipe: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(environment)
    try:
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
