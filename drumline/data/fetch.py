"""From a request for positions to a batch of samples: what a DataLoader worker runs, or the training process
itself.

The batch depends on the request and the seed alone. For a map-style dataset the global generators of torch,
numpy and `random` are seeded from (seed, epoch, index) before each sample, so that an augmentation that uses
them is the same whatever rank or worker runs it; afterwards the process gets its own generator states back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from drumline.data.dataset import Gathered, checked_length, is_in_two_parts, makes_batches
from drumline.data.draws import Draws
from drumline.data.permutation import permute

_SAMPLE_SEEDS = 0x5EED  # the stream of draws that seeds are taken from


class Request(NamedTuple):
    """Positions [low, high) of an epoch: shuffled and augmented for training, as they are for evaluation."""

    epoch: int
    low: int
    high: int
    shuffled: bool


class Fetch(Dataset[Any]):
    """Answers requests from a dataset of either kind. `leaves_rest`: of a dataset in two parts it answers with the
    first, and leaves the rest to `finish`; `pinned` then says in which memory the first part is wanted."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
        leaves_rest: bool = False,
        pinned: bool = False,
    ) -> None:
        self.dataset = dataset
        self.length = checked_length(dataset)
        self._seed = seed
        self._collate = collate or default_collate
        self._makes_batches = makes_batches(dataset)
        self._leaves_rest = leaves_rest and is_in_two_parts(dataset)
        self._pinned = pinned

    def __getitem__(self, request: Request) -> Any:
        indices = np.arange(request.low, request.high, dtype=np.int64)
        if request.shuffled:
            indices = permute(indices, length=self.length, seed=self._seed, epoch=request.epoch)
        draws = Draws(self._seed, request.epoch, indices)
        if self._leaves_rest:
            choices = self.dataset.choose(draws if request.shuffled else None)
            return Gathered(self.dataset.gather(indices, pinned=self._pinned), choices)
        if self._makes_batches:
            return self.dataset.batch(indices, draws if request.shuffled else None)
        with generators_put_back():
            return self._collate(self._samples(draws))

    def finish(self, answer: Any) -> Any:
        """The batch of an answer, which may have been brought to a device."""
        return self.dataset.finish(*answer) if isinstance(answer, Gathered) else answer

    def _samples(self, draws: Draws) -> list[Any]:
        seeds = draws.bits(1, stream=_SAMPLE_SEEDS)[:, 0].tolist()
        samples = []
        for index, seed in zip(draws.indices.tolist(), seeds, strict=True):
            seed_generators(seed)
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                error.add_note(f"while reading sample {index} of {type(self.dataset).__name__}")
                raise
        return samples


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, numpy and `random` for what a dataset does next."""
    # Not torch.manual_seed: that would also reset the generators of the GPUs, which belong to the model.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Afterwards the global generators are as they were."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
