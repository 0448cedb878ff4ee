"""Times several ways of doing the same work: in turn, in blocks of steps, in one process.

A way is a loop that takes steps and calls `after_step` after each. All ways warm up; then they take
turns, a different one first in every round, so that a slow machine slows all of them. A block is
timed from its first step until the device has finished its last one; nothing waits for the device
in between. While a way is paused, its processes are stopped, after its background writes have
finished, so that it neither works ahead nor slows the others.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from benchmarks.paused_loop import AfterStep, PausedLoop
from benchmarks.stopping import resume, stop


@dataclass(frozen=True)
class Way:
    """One way to do the work of a table."""

    name: str
    run: Callable[[AfterStep], object]
    """The loop, which takes steps without end."""
    wake: Callable[[], None] = lambda: None
    """Called before its turn: resumes the way's processes."""
    rest: Callable[[], None] = lambda: None
    """Called after its turn: waits for the way's background work, and stops its processes."""
    warm_up: int | None = None
    """Steps before the first timed block; None: the table's number."""


@dataclass
class Taken:
    """The measurements of a way."""

    name: str
    seconds: list[float] = field(default_factory=list)
    """For each block."""
    samples: list[int] = field(default_factory=list)
    steps: int = 0
    """Of one block."""
    failure: str | None = None

    def per_step(self) -> list[float]:
        return [seconds / self.steps for seconds in self.seconds]

    def per_second(self) -> list[float]:
        return [
            samples / seconds for samples, seconds in zip(self.samples, self.seconds, strict=True)
        ]


def time_steps(taken: Iterator[object], steps: int) -> float:
    """Seconds a step of an iterator that takes them."""
    begun = time.perf_counter()
    for _ in range(steps):
        next(taken)
    synchronize()
    return (time.perf_counter() - begun) / steps


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _Runner:
    """A way that can be paused and resumed."""

    def __init__(self, way: Way, steps: int) -> None:
        self.way = way
        self.taken = Taken(way.name, steps=steps)
        self._loop = PausedLoop(way.run)
        self._workers: list[int] = []

    def warm_up(self, steps: int) -> None:
        before = set(multiprocessing.active_children())
        self.way.wake()
        self._loop.take(self.way.warm_up or steps)
        synchronize()
        self._workers = [
            child.pid
            for child in multiprocessing.active_children()
            if child not in before and child.pid
        ]
        self.rest()

    def time_block(self) -> None:
        self.wake()
        synchronize()
        begun = time.perf_counter()
        samples = self._loop.take(self.taken.steps)
        synchronize()
        self.taken.seconds.append(time.perf_counter() - begun)
        self.taken.samples.append(samples)
        self.rest()

    def wake(self) -> None:
        self.way.wake()
        for worker in self._workers:
            resume(worker)

    def rest(self) -> None:
        self.way.rest()
        for worker in self._workers:
            stop(worker)

    def close(self) -> None:
        self.wake()
        self._loop.close()


def measure(ways: list[Way], *, rounds: int, steps: int, warm_up: int) -> list[Taken]:
    """Let all ways take turns. One that fails is left out from then on, and has the error in its
    result."""
    runners = [_Runner(way, steps) for way in ways]
    try:
        # The last ones, ours, first: a graph is captured before others have threads that may touch
        # the device.
        for runner in reversed(runners):
            _warm_up(runner, warm_up)
        for turn in range(rounds):
            first = turn % len(runners)
            for runner in runners[first:] + runners[:first]:
                _try(runner, runner.time_block)
    finally:
        for runner in runners:
            runner.close()
    return [runner.taken for runner in runners]


def _warm_up(runner: _Runner, steps: int) -> None:
    begun = time.perf_counter()
    _try(runner, lambda: runner.warm_up(steps))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if os.environ.get("RANK", "0") == "0":
        seconds = time.perf_counter() - begun
        print(f"  warm: {runner.way.name}, {seconds:.0f} s", file=sys.stderr, flush=True)


def _try(runner: _Runner, work: Callable[[], None]) -> None:
    if runner.taken.failure is not None:
        return
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # they hold the way's model
        runner.taken.failure = error_line(error)


def error_line(error: Exception) -> str:
    """The error as one line of a table."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"
