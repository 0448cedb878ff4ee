"""Random numbers for samples, decided by (seed, epoch, sample index) and never by the rank or worker that asks.

The n-th number of a sample is a hash of its coordinates, so a whole batch is drawn at once, in any order, and nothing
has to be saved in a checkpoint. Only integer arithmetic modulo 2**64: the numbers are the same on every platform.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
# The odd number nearest 2**64 divided by the golden ratio: its multiples are spread evenly over 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15
# Multipliers and shifts of the splitmix64 finaliser, a bijection of 64-bit integers.
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
# Arrays of no dimension: of a scalar numpy would make one each time.
_ARRAY_MULTIPLIERS = tuple(np.array(multiplier, dtype=np.uint64) for multiplier in _MULTIPLIERS)
_ARRAY_SHIFTS = tuple(np.array(shift, dtype=np.uint64) for shift in _SHIFTS)
_DROPPED_BITS = np.uint64(11)  # a float64 holds 53 of 64 bits


class Draws:
    """Random numbers for the samples of one batch: a row for each of `indices`."""

    __slots__ = ("epoch", "indices", "seed")

    def __init__(self, seed: int, epoch: int, indices: NDArray[np.int64]) -> None:
        self.seed = seed
        self.epoch = epoch
        self.indices = indices

    def bits(self, count: int, *, stream: int = 0) -> NDArray[np.uint64]:
        """64 random bits, `count` for each sample; another `stream` gives independent ones."""
        offset = np.uint64(hash_integers(self.seed, self.epoch, stream))
        starts = _mix_in_place(self.indices.astype(np.uint64) + offset)
        counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        return _mix_in_place(starts[:, np.newaxis] + counters)

    def uniform(self, count: int, *, stream: int = 0) -> NDArray[np.float64]:
        """Numbers in [0, 1), `count` for each sample; another `stream` gives independent ones."""
        kept: NDArray[np.float64] = (self.bits(count, stream=stream) >> _DROPPED_BITS).astype(np.float64)
        kept *= 2.0**-53
        return kept


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
