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
    starts = rows[:, 0]
    ends = np.maximum.accumulate(rows[:, 1])

    # A row that starts after all before it have ended begins an interval.
    is_after_gap = starts[1:] > ends[:-1]
    is_first = np.append(True, is_after_gap)
    is_last = np.append(is_after_gap, True)
    return np.stack([starts[is_first], ends[is_last]], axis=1)


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """The instants of both."""
    # What an interval on the left overlaps on the right are neighbours: from `first` to `end`.
    first = np.searchsorted(right[:, 1], left[:, 0], "right")
    end = np.searchsorted(right[:, 0], left[:, 1], "left")
    counts = np.maximum(0, end - first)

    # One row for each pair that overlaps.
    left_places = np.repeat(np.arange(len(left)), counts)
    pairs_before = np.cumsum(counts) - counts
    first_of_pair = (first - pairs_before)[left_places]
    right_places = first_of_pair + np.arange(len(left_places))
    left_rows = left[left_places]
    right_rows = right[right_places]

    starts = np.maximum(left_rows[:, 0], right_rows[:, 0])
    ends = np.minimum(left_rows[:, 1], right_rows[:, 1])
    return np.stack([starts, ends], axis=1)


def difference(intervals: Intervals, removed: Intervals) -> Intervals:
    """The instants of the first that are not in the second."""
    if not len(intervals) or not len(removed):
        return intervals

    low = intervals[0, 0]
    high = intervals[-1, 1]
    edges = removed.reshape(-1).clip(low, high)
    gaps = np.concatenate([[low], edges, [high]]).reshape(-1, 2)
    is_open = gaps[:, 1] > gaps[:, 0]

    return intersection(intervals, gaps[is_open])


def clipped(intervals: Intervals, low: float, high: float) -> Intervals:
    """The instants from `low` to `high`."""
    first = np.searchsorted(intervals[:, 1], low, "right")
    last = np.searchsorted(intervals[:, 0], high, "left")
    return intervals[first:last].clip(low, high)


def contains(intervals: Intervals, times: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of these times are in the set."""
    num_edges_before = np.searchsorted(intervals.reshape(-1), times, "right")
    inside: NDArray[np.bool_] = num_edges_before % 2 == 1
    return inside


def length(intervals: Intervals) -> float:
    """The seconds in the set."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def length_until(intervals: Intervals, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of the set is before each of these times."""
    if not len(intervals):
        return np.zeros(len(times))

    starts, ends = intervals.T
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths

    num_started = np.searchsorted(starts, times, "right")
    last = np.maximum(num_started - 1, 0)
    in_last = np.minimum(times, ends[last]) - starts[last]
    return np.where(num_started > 0, before[last] + in_last, 0.0)
