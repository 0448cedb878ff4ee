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
    if not len(left) or not len(right):
        return np.empty((0, 2))
    times = np.concatenate([left.reshape(-1), right.reshape(-1)])
    changes = np.tile([1, -1], len(left) + len(right))
    order = np.lexsort((changes, times))  # at the same time an end comes before a start
    times = times[order]
    depth = np.cumsum(changes[order])
    begins = np.flatnonzero(depth[:-1] == 2)
    rows = np.stack([times[begins], times[begins + 1]], axis=1)
    return rows[rows[:, 1] > rows[:, 0]]


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
