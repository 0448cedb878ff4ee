"""From a request for positions to a batch of samples; it runs in a DataLoader worker or in the training process.

The batch depends on the request and the seed alone. For a map-style dataset the global generators of torch, numpy and
`random` are seeded from (seed, epoch, index) before each sample, so that an augmentation that uses them is the same in
any rank or worker; afterwards the process gets its own generator states back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from drumline.data.dataset import PartialBatch, checked_length, is_in_two_parts, makes_batches
from drumline.data.draws import Draws
from drumline.data.permutation import permute

_SAMPLE_SEEDS = 0x5EED  # the stream of draws that seeds are taken from


class BatchRequest(NamedTuple):
    """Positions [low, high) of an epoch: shuffled and augmented for training, as they are for evaluation."""

    epoch: int
    low: int
    high: int
    shuffled: bool


class BatchMaker(Dataset[Any]):
    """`maker[request]` is a batch. With `defer_finish` it is only the first part of it for a dataset in two parts, and
    `finish` makes the batch; `pinned` is the kind of memory for that first part."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
        defer_finish: bool = False,
        pinned: bool = False,
    ) -> None:
        self.dataset = dataset
        self.length = checked_length(dataset)
        self._seed = seed
        self._collate = collate or default_collate
        self._makes_batches = makes_batches(dataset)
        self._defer_finish = defer_finish and is_in_two_parts(dataset)
        self._pinned = pinned

    def __getitem__(self, request: BatchRequest) -> Any:
        indices = np.arange(request.low, request.high, dtype=np.int64)
        if request.shuffled:
            indices = permute(indices, length=self.length, seed=self._seed, epoch=request.epoch)
        draws = Draws(self._seed, request.epoch, indices)
        if self._defer_finish:
            choices = self.dataset.choose(draws if request.shuffled else None)
            return PartialBatch(self.dataset.gather(indices, pinned=self._pinned), choices)
        if self._makes_batches:
            return self.dataset.batch(indices, draws if request.shuffled else None)
        with restored_generators():
            return self._collate(self._samples(draws))

    def finish(self, made: Any) -> Any:
        """The batch, from what `maker[request]` gave, on whatever device that is now."""
        return self.dataset.finish(*made) if isinstance(made, PartialBatch) else made

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
def restored_generators() -> Iterator[None]:
    """Afterwards the global generators are as they were."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
