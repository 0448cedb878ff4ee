"""One seed for a run, several kinds of randomness from it.

Initial weights are the same on every rank; randomness inside the model (dropout) is each rank's own, or in the elastic
mode each shard's; and the randomness of a sample belongs to the sample (data/draws.py), whichever rank loads it.
"""

from __future__ import annotations

import random

import numpy as np
import torch

MODEL_STREAM = 1
RANK_STREAM = 2
SHARD_STREAM = 3


def seed_shared(seed: int) -> None:
    """Seed all generators the same way on every rank: what is built next is the same everywhere."""
    _seed_generators(np.random.SeedSequence([seed, MODEL_STREAM]))


def seed_rank(seed: int, rank: int) -> None:
    """Seed all generators differently on every rank: what is drawn next is this rank's own."""
    _seed_generators(np.random.SeedSequence([seed, RANK_STREAM, rank]))


def seed_shard(seed: int, *, epoch: int, start: int, shard: int) -> None:
    """Seed all generators for one shard of the global batch that starts there: what is drawn next is the same on
    whichever rank computes it."""
    _seed_generators(np.random.SeedSequence([seed, SHARD_STREAM, epoch, start, shard]))


def _seed_generators(sequence: np.random.SeedSequence) -> None:
    torch_seed, python_seed, numpy_seed = (int(word) for word in sequence.generate_state(3, np.uint64))
    torch.manual_seed(torch_seed & (2**63 - 1))
    random.seed(python_seed)
    np.random.seed(numpy_seed & 0xFFFFFFFF)
