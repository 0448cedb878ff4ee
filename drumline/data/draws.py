"""The random numbers of samples, and the order of an epoch.

Both depend only on (seed, epoch, sample index), never on the rank or worker. A number is a hash of
these, so a whole batch is drawn at once, in any order, and a checkpoint has nothing to save. The
arithmetic is on integers modulo 2**64: the numbers are the same on every platform.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
# The odd number nearest 2**64 divided by the golden ratio: its multiples are spread evenly over 64
# bits.
_GOLDEN = 0x9E3779B97F4A7C15
# Multipliers and shifts of the splitmix64 finaliser, a bijection of 64-bit integers.
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
# Zero-dimensional arrays: numpy would convert a scalar each time.
_ARRAY_MULTIPLIERS = tuple(np.array(multiplier, dtype=np.uint64) for multiplier in _MULTIPLIERS)
_ARRAY_SHIFTS = tuple(np.array(shift, dtype=np.uint64) for shift in _SHIFTS)
_DROPPED_BITS = np.uint64(11)  # a float64 holds 53 of 64 bits
# Pairs of Feistel rounds of a shuffle: the fewest that make every order of five samples about
# equally likely (chi-square over 24,000 seeds; five pairs fail it). A pair takes about five
# microseconds per batch.
_ROUND_PAIRS = 6


class Draws:
    """Random numbers for the samples of one batch: a row for each of `indices`."""

    __slots__ = ("epoch", "indices", "seed")

    def __init__(self, seed: int, epoch: int, indices: NDArray[np.int64]) -> None:
        self.seed = seed
        self.epoch = epoch
        self.indices = indices

    def bits(self, count: int, *, stream: int = 0) -> NDArray[np.uint64]:
        """64 random bits, `count` for each sample; a different `stream` gives independent ones."""
        offset = np.uint64(hash_integers(self.seed, self.epoch, stream))
        starts = _mix_in_place(self.indices.astype(np.uint64) + offset)
        counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        return _mix_in_place(starts[:, np.newaxis] + counters)

    def uniform(self, count: int, *, stream: int = 0) -> NDArray[np.float64]:
        """Numbers in [0, 1), `count` for each sample; a different `stream` gives independent
        ones."""
        bits = self.bits(count, stream=stream) >> _DROPPED_BITS
        numbers: NDArray[np.float64] = bits.astype(np.float64)
        numbers *= 2.0**-53
        return numbers


def hash_integers(*numbers: int) -> int:
    """64 bits that follow from a sequence of integers, such as (seed, epoch)."""
    state = 0
    for number in numbers:
        state = ((state ^ (number & _MASK)) + _GOLDEN) & _MASK
        state ^= state >> _SHIFTS[0]
        state = state * _MULTIPLIERS[0] & _MASK
        state ^= state >> _SHIFTS[1]
        state = state * _MULTIPLIERS[1] & _MASK
        state ^= state >> _SHIFTS[2]
    return state


def _mix_in_place(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same finaliser for a whole array, which it overwrites and returns."""
    numbers ^= numbers >> _ARRAY_SHIFTS[0]
    numbers *= _ARRAY_MULTIPLIERS[0]
    numbers ^= numbers >> _ARRAY_SHIFTS[1]
    numbers *= _ARRAY_MULTIPLIERS[1]
    numbers ^= numbers >> _ARRAY_SHIFTS[2]
    return numbers


def permute(
    positions: NDArray[np.int64], *, length: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """The sample indices at these positions of the epoch's shuffled order: a bijection of [0,
    length).

    The order is not stored: each index is computed separately, so ranks and workers compute only
    the indices of their own batch. A dataset of a billion samples costs three megabytes and a few
    milliseconds per epoch, not eight gigabytes and minutes.
    """
    if positions.size == 0:
        return positions.copy()
    grid = _grid(length, seed, epoch)
    indices = _shuffle(positions, grid)
    # The grid has up to sqrt(length) extra cells. A position that lands on one is shuffled again
    # until it lands inside ("cycle walking"): a bijection of the grid becomes one of the positions.
    while indices.max() >= length:
        outside = indices >= length
        indices[outside] = _shuffle(indices[outside], grid)
    return indices


class _Grid(NamedTuple):
    """Positions are laid out on about sqrt(length) rows and columns."""

    # Zero-dimensional arrays: numpy would convert a number in each round.
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    row_shifts: NDArray[np.int64]
    """[pair, column]: what is added to the row."""
    column_shifts: NDArray[np.int64]
    """[pair, row]: what is added to the column."""


@lru_cache(maxsize=4)
def _grid(length: int, seed: int, epoch: int) -> _Grid:
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)
    draws = Draws(seed, epoch, np.arange(_ROUND_PAIRS, dtype=np.int64))
    return _Grid(
        rows=np.array(rows),
        columns=np.array(columns),
        row_shifts=(draws.uniform(columns, stream=1) * rows).astype(np.int64),
        column_shifts=(draws.uniform(rows, stream=2) * columns).astype(np.int64),
    )


def _shuffle(cells: NDArray[np.int64], grid: _Grid) -> NDArray[np.int64]:
    """Feistel rounds: a random number that depends on the column is added to the row (modulo the
    number of rows), then the other way round. Each is a bijection of the grid."""
    row, column = np.divmod(cells, grid.columns)
    for row_shift, column_shift in zip(grid.row_shifts, grid.column_shifts, strict=True):
        row += row_shift[column]
        row %= grid.rows
        column += column_shift[row]
        column %= grid.columns
    row *= grid.columns
    row += column
    return row
