"""Sets of instants, as sorted and disjoint intervals: an array of rows (start, end)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]


def union(pairs: Iterable[tuple[float, float]] | Intervals) -> Intervals:
    """The instants of any of these intervals, which may overlap; empty and reversed ones are left
    out."""
    rows = np.array(
        pairs if isinstance(pairs, np.ndarray) else list(pairs), dtype=np.float64
    ).reshape(-1, 2)
    rows = rows[rows[:, 1] > rows[:, 0]]
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    ends = np.maximum.accumulate(rows[:, 1])
    is_first = np.concatenate([[True], rows[1:, 0] > ends[:-1]])
    last = np.concatenate([np.flatnonzero(is_first)[1:] - 1, [len(rows) - 1]])
    return np.stack([rows[is_first, 0], ends[last]], axis=1)


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """The instants of both."""
    first = np.searchsorted(right[:, 1], left[:, 0], "right")
    last = np.searchsorted(right[:, 0], left[:, 1], "left")
    counts = np.maximum(0, last - first)
    of_left = np.repeat(np.arange(len(left)), counts)
    before = np.cumsum(counts) - counts
    of_right = np.arange(len(of_left)) + (first - before)[of_left]
    starts = np.maximum(left[of_left, 0], right[of_right, 0])
    ends = np.minimum(left[of_left, 1], right[of_right, 1])
    return np.stack([starts, ends], axis=1)


def difference(intervals: Intervals, removed: Intervals) -> Intervals:
    """The instants of the first that are not in the second."""
    if not len(intervals) or not len(removed):
        return intervals
    low = intervals[0, 0]
    high = intervals[-1, 1]
    gaps = np.concatenate([[low], removed.reshape(-1).clip(low, high), [high]]).reshape(-1, 2)
    return intersection(intervals, gaps[gaps[:, 1] > gaps[:, 0]])


def clipped(intervals: Intervals, low: float, high: float) -> Intervals:
    """The instants from `low` to `high`."""
    first = np.searchsorted(intervals[:, 1], low, "right")
    last = np.searchsorted(intervals[:, 0], high, "left")
    return intervals[first:last].clip(low, high)


def length(intervals: Intervals) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def length_until(intervals: Intervals, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of the set is before each of these times."""
    lengths = intervals[:, 1] - intervals[:, 0]
    before = np.concatenate([[0.0], np.cumsum(lengths)])
    number = np.searchsorted(intervals[:, 0], times, "right")
    last = np.maximum(number - 1, 0)
    if not len(intervals):
        return np.zeros(len(times))
    inside = np.minimum(times, intervals[last, 1]) - intervals[last, 0]
    return np.where(number > 0, before[last] + inside, 0.0)
