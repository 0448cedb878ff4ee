"""Sets of instants, as sorted and disjoint intervals: an array of rows (start, end)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]


def union(pairs: Iterable[tuple[float, float]] | Intervals) -> Intervals:
    """The instants of any of these intervals, which may overlap; empty and reversed ones are left
    out."""
    if not isinstance(pairs, np.ndarray):
        pairs = np.array(list(pairs), dtype=np.float64)
    rows = pairs.reshape(-1, 2)
    rows = rows[rows[:, 1] > rows[:, 0]]
    if not len(rows):
        return rows

    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    ends = np.maximum.accumulate(rows[:, 1])
    is_after_gap = rows[1:, 0] > ends[:-1]
    starts = rows[np.append(True, is_after_gap), 0]
    return np.stack([starts, ends[np.append(is_after_gap, True)]], axis=1)


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """The instants of both."""
    # Of each interval on the left, those on the right that it overlaps are one after the other.
    first = np.searchsorted(right[:, 1], left[:, 0], "right")
    end = np.searchsorted(right[:, 0], left[:, 1], "left")
    counts = np.maximum(0, end - first)

    pairs_before = np.cumsum(counts) - counts
    of_left = np.repeat(np.arange(len(left)), counts)
    of_right = np.arange(len(of_left)) + (first - pairs_before)[of_left]

    low = np.maximum(left[of_left, 0], right[of_right, 0])
    high = np.minimum(left[of_left, 1], right[of_right, 1])
    return np.stack([low, high], axis=1)


def difference(intervals: Intervals, removed: Intervals) -> Intervals:
    """The instants of the first that are not in the second."""
    if not len(intervals) or not len(removed):
        return intervals

    low = intervals[0, 0]
    high = intervals[-1, 1]
    edges = removed.reshape(-1).clip(low, high)
    gaps = np.concatenate([[low], edges, [high]]).reshape(-1, 2)
    return intersection(intervals, gaps[gaps[:, 1] > gaps[:, 0]])


def clipped(intervals: Intervals, low: float, high: float) -> Intervals:
    """The instants from `low` to `high`."""
    first = np.searchsorted(intervals[:, 1], low, "right")
    last = np.searchsorted(intervals[:, 0], high, "left")
    return intervals[first:last].clip(low, high)


def length(intervals: Intervals) -> float:
    """The seconds in the set."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def length_until(intervals: Intervals, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of the set is before each of these times."""
    if not len(intervals):
        return np.zeros(len(times))

    starts, ends = intervals.T
    before = np.cumsum(ends - starts) - (ends - starts)
    number = np.searchsorted(starts, times, "right")
    last = np.maximum(number - 1, 0)
    inside = np.minimum(times, ends[last]) - starts[last]
    return np.where(number > 0, before[last] + inside, 0.0)
