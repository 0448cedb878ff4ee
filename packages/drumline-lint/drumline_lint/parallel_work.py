"""Runs a function on parts of the work in several processes, which begin as copies of this one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

Part = TypeVar("Part")
Outcome = TypeVar("Outcome")


def num_processes(jobs: str) -> int:
    """For `--jobs`: a number, or `auto` for the cores that this process may use. Raises ValueError.

    One where a process cannot be copied, as on Windows.
    """
    number = len(os.sched_getaffinity(0)) if jobs == "auto" else int(jobs)
    if number < 1:
        raise ValueError("there is at least one process")
    return number if "fork" in multiprocessing.get_all_start_methods() else 1


def in_processes(work: Callable[[Part], Outcome], parts: Sequence[Part]) -> list[Outcome]:
    """The outcome for each part, in order. This process does the first one, and again any whose
    process was killed."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in parts[1:]]
    processes = [
        context.Process(target=_send, args=(work, part, sending), daemon=True)
        for part, (_, sending) in zip(parts[1:], pipes, strict=True)
    ]
    try:
        for process, (_, sending) in zip(processes, pipes, strict=True):
            process.start()
            sending.close()  # so that the end of the process is the end of its pipe
        outcomes = [work(part) for part in parts[:1]]
        for part, (receiving, _) in zip(parts[1:], pipes, strict=True):
            outcomes.append(_received(receiving, work, part))
        return outcomes
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()


def _send(work: Callable[[Part], Outcome], part: Part, sending: Connection) -> None:
    sending.send(work(part))


def _received(receiving: Connection, work: Callable[[Part], Outcome], part: Part) -> Outcome:
    try:
        outcome: Outcome = receiving.recv()
    except EOFError:
        return work(part)
    return outcome
