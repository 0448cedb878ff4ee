"""Sets of instants, as sorted and disjoint intervals: an array of rows (start, end).

`[[0, 2], [5, 6]]` is the time from 0 to 2 and from 5 to 6. A trace has hundreds of thousands of
intervals, so no function has a loop over them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]
Intervals = Numbers


def union(pairs: Iterable[tuple[float, float]] | Intervals) -> Intervals:
    """The instants of any of these intervals, which may overlap; empty and reversed ones are left
    out: of (5, 6), (0, 2) and (1, 3) `[[0, 3], [5, 6]]`."""
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
    """The instants of both: of `[[0, 3], [5, 6]]` and `[[2, 9]]` `[[2, 3], [5, 6]]`."""
    # What an interval on the left overlaps on the right are neighbours: from `first` to `end`.
    left_starts, left_ends = left.T
    right_starts, right_ends = right.T
    first = np.searchsorted(right_ends, left_starts, "right")
    end = np.searchsorted(right_starts, left_ends, "left")
    counts = np.maximum(0, end - first)

    # One row for each pair that overlaps: its place on the left and on the right.
    left_places = np.repeat(np.arange(len(left)), counts)
    pairs_before = np.cumsum(counts) - counts
    first_of_pair = (first - pairs_before)[left_places]
    right_places = first_of_pair + np.arange(len(left_places))

    starts = np.maximum(left_starts[left_places], right_starts[right_places])
    ends = np.minimum(left_ends[left_places], right_ends[right_places])
    return np.stack([starts, ends], axis=1)


def difference(intervals: Intervals, removed: Intervals) -> Intervals:
    """The instants of the first that are not in the second: of `[[0, 3]]` without `[[1, 2]]`
    `[[0, 1], [2, 3]]`."""
    if not len(intervals) or not len(removed):
        return intervals

    # Between the removed intervals are the gaps, in which instants stay.
    low = intervals[0, 0]
    high = intervals[-1, 1]
    edges = removed.reshape(-1).clip(low, high)
    gaps = np.concatenate([[low], edges, [high]]).reshape(-1, 2)
    is_open = gaps[:, 1] > gaps[:, 0]

    return intersection(intervals, gaps[is_open])


def clipped(intervals: Intervals, low: float, high: float) -> Intervals:
    """The instants from `low` to `high`: of `[[0, 3], [5, 6]]` from 2 to 9 `[[2, 3], [5, 6]]`."""
    first = np.searchsorted(intervals[:, 1], low, "right")
    last = np.searchsorted(intervals[:, 0], high, "left")
    return intervals[first:last].clip(low, high)


def contains(intervals: Intervals, times: Numbers) -> Mask:
    """Which of these times are in the set: after an odd number of its starts and ends."""
    num_edges_before = np.searchsorted(intervals.reshape(-1), times, "right")
    inside: Mask = num_edges_before % 2 == 1
    return inside


def length(intervals: Intervals) -> float:
    """The seconds in the set."""
    starts, ends = intervals.T
    return float((ends - starts).sum())


def length_until(intervals: Intervals, times: Numbers) -> Numbers:
    """How much of the set is before each of these times: of `[[0, 3], [5, 6]]` 3 is before 4."""
    if not len(intervals):
        return np.zeros(len(times))

    starts, ends = intervals.T
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths

    # What began last counts up to the time, all before it as a whole.
    num_started = np.searchsorted(starts, times, "right")
    last = np.maximum(num_started - 1, 0)
    in_last = np.minimum(times, ends[last]) - starts[last]

    return np.where(num_started > 0, before[last] + in_last, 0.0)
