"""How long the steps of a run take: the median, the 99th percentile and the stalls. Evaluations and
saves between steps do not count. No torch."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass

FIRST_STEPS = 2
"""They are not counted: torch warms up, and loaders start their workers."""
STALL = 2.0
"""A step is a stall if it takes so many times the median."""
MOST_LONG_STEPS = 5
BIN_RATIO = 1.02
"""Of the bounds of a bin: the median and the percentile are as exact as that."""


@dataclass(frozen=True, kw_only=True)
class LongStep:
    step: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Of all steps of one rank since it started."""

    rank: int
    count: int
    median_s: float
    p99_s: float
    stalls: int
    stalled_part: float
    """Of the time of all steps: what stalls took beyond the median."""
    longest: tuple[LongStep, ...]


class StepTimesHistogram:
    """Takes no more memory for more steps."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._bins: Counter[int] = Counter()
        self._total_s = 0.0
        self._longest: list[tuple[float, int]] = []

    def add(self, step: int, seconds: float) -> None:
        if step < FIRST_STEPS or not 0 < seconds < math.inf:
            return
        self._bins[round(math.log(seconds, BIN_RATIO))] += 1
        self._total_s += seconds
        heapq.heappush(self._longest, (seconds, step))
        if len(self._longest) > MOST_LONG_STEPS:
            heapq.heappop(self._longest)

    def times(self) -> StepTimes | None:
        if not self._bins:
            return None
        median_s = self._quantile(0.5)
        stalls = [
            (BIN_RATIO**number, count)
            for number, count in self._bins.items()
            if BIN_RATIO**number > STALL * median_s
        ]
        stalled_s = sum(count * (seconds - median_s) for seconds, count in stalls)
        longest = sorted(self._longest, reverse=True)
        return StepTimes(
            rank=self._rank,
            count=self._bins.total(),
            median_s=median_s,
            p99_s=self._quantile(0.99),
            stalls=sum(count for _, count in stalls),
            stalled_part=stalled_s / self._total_s,
            longest=tuple(LongStep(step=step, seconds=seconds) for seconds, step in longest),
        )

    def _quantile(self, part: float) -> float:
        left = part * self._bins.total()
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left <= 0:
                return float(BIN_RATIO**number)
        raise AssertionError("more than all")
