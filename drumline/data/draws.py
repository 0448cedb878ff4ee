"""Randomness of samples: decided by (seed, epoch, sample index), never by the rank or worker that runs it.

Counter-based: the n-th number of a sample is a hash of its coordinates, so a whole batch is drawn at once, in
any order, and nothing has to be saved in a checkpoint.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from drumline.data.mixing import GOLDEN, key, mix_in_place

_GOLDEN = np.uint64(GOLDEN)
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
        offset = np.uint64(key(self.seed, self.epoch, stream))
        starts = mix_in_place(self.indices.astype(np.uint64) + offset)
        counters = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        return mix_in_place(starts[:, np.newaxis] + counters)

    def uniform(self, count: int, *, stream: int = 0) -> NDArray[np.float64]:
        """Numbers in [0, 1), `count` for each sample; another `stream` gives independent ones."""
        kept: NDArray[np.float64] = (self.bits(count, stream=stream) >> _DROPPED_BITS).astype(np.float64)
        kept *= 2.0**-53
        return kept
