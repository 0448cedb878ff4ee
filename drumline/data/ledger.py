"""The sample ledger: which positions of each epoch's order a rank has trained on, in runs rather than lists.

The training loop adds every step; a run of steps that each move on by one global batch is five numbers, however long
it is. An epoch is one run, or two when its last batch is short. Before each save all ranks hand in their runs, and
rank 0 writes them down (`engine/ledger_file.py`); `drumline verify` replays them. (The samples of a stream are dealt
one by one, so there a share says how many of the global batch a rank had, not which.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from drumline.data.plan import StepPlan


class Run(NamedTuple):
    """`steps` steps of one rank: in the first it had the positions [low, high), in each next one `stride` further."""

    epoch: int
    low: int
    high: int
    stride: int
    """How many samples the global batch had."""
    steps: int

    def piece(self, first: int, steps: int) -> Run:
        """So many of its steps, from its `first`-th (counted from 0) on."""
        moved = first * self.stride
        return self._replace(low=self.low + moved, high=self.high + moved, steps=steps)


class Ledger:
    """What this rank's steps have covered since it was last asked."""

    __slots__ = ("_count", "_epoch", "_first", "_high", "_low", "_runs", "_stop", "_stride")
    _low: int
    _high: int
    _stop: int
    _count: int

    def __init__(self) -> None:
        self._runs: list[Run] = []
        self._forget()

    def add(self, plan: StepPlan) -> None:
        """Note a step. Every step pays for this: mostly it only counts one up."""
        low, high = plan.share
        if low == self._low and high == self._high and plan.stop == self._stop and plan.epoch == self._epoch:
            stride = self._stride
            self._count += 1
            self._low = low + stride
            self._high = high + stride
            self._stop += stride
        else:
            self._begin(plan, low, high)

    def take(self) -> list[Run]:
        """The runs since this was last called; the ledger is then empty."""
        self._end_run()
        runs, self._runs = self._runs, []
        self._forget()
        return runs

    def _begin(self, plan: StepPlan, low: int, high: int) -> None:
        self._end_run()
        stride = plan.stop - plan.start
        self._epoch, self._stride, self._count = plan.epoch, stride, 1
        self._first = (low, high)
        self._low, self._high, self._stop = low + stride, high + stride, plan.stop + stride

    def _end_run(self) -> None:
        if self._count:
            self._runs.append(Run(self._epoch, *self._first, self._stride, self._count))

    def _forget(self) -> None:
        self._epoch = self._stride = self._count = 0
        self._first = (0, 0)
        self._low = self._high = self._stop = -1  # what the run's next step would cover; no step covers this


def num_steps(runs: Iterable[Run]) -> int:
    """How many steps there are in runs that follow each other."""
    return sum(run.steps for run in runs)


def to_json(runs: Iterable[Run]) -> list[list[int]]:
    """Runs as lists of five numbers."""
    return [list(run) for run in runs]


def from_json(value: Any) -> list[Run]:
    """The runs in a JSON value; a ValueError says what no ledger has written."""
    if not isinstance(value, list):
        raise ValueError("it is no list of runs")
    return [_run(numbers) for numbers in value]


def _run(numbers: Any) -> Run:
    if not isinstance(numbers, Sequence) or len(numbers) != 5:
        raise ValueError(f"{numbers!r} is no run")
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{numbers!r} holds more than whole numbers")
    run = Run(*numbers)
    if not 0 <= run.low <= run.high or min(run.epoch, run.stride - 1, run.steps - 1) < 0:
        raise ValueError(f"{numbers!r} is no run of steps")
    return run
