"""Runs a function on parts of the work in several processes, which begin as copies of this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Part = TypeVar("Part")
Outcome = TypeVar("Outcome")
_inherited: list[Any] = []
"""In a copy: the function and the parts."""


def num_processes(jobs: str) -> int:
    """For `--jobs`: a number, or `auto` for the cores that this process may use. Raises ValueError.

    One where a process cannot be copied, as on Windows.
    """
    number = len(os.sched_getaffinity(0)) if jobs == "auto" else int(jobs)
    if number < 1:
        raise ValueError("there is at least one process")

    return number if hasattr(os, "fork") else 1


def in_processes(work: Callable[[Part], Outcome], parts: Sequence[Part]) -> list[Outcome]:
    """The outcome for each part, in order. This process does the first one, and again any whose
    process was killed."""
    if len(parts) < 2:
        return [work(part) for part in parts]

    import multiprocessing  # slow to import
    from concurrent.futures import ProcessPoolExecutor, process

    pool = ProcessPoolExecutor(
        len(parts) - 1,
        multiprocessing.get_context("fork"),
        initializer=_inherited.extend,
        initargs=([work, parts],),
    )
    with pool:
        futures = [pool.submit(_work_on, number) for number in range(1, len(parts))]
        outcomes = [work(parts[0])]

        for future, part in zip(futures, parts[1:], strict=True):
            try:
                outcomes.append(future.result())
            except process.BrokenProcessPool:
                outcomes.append(work(part))
    return outcomes


def _work_on(number: int) -> Any:
    """In a copy: the outcome of a part."""
    work, parts = _inherited
    return work(parts[number])
