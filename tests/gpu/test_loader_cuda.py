"""Batches on a GPU: the same as on the CPU, by way of pinned memory, without touching the model's
randomness."""

from __future__ import annotations

import gc
from contextlib import closing
from typing import Any

import pytest
import torch

from drumline.data.dataset import BatchMaker, BatchRequest
from drumline.data.delivery import BatchProducer, LoadingOptions
from drumline.data.images import digits
from drumline.data.loader import IndexedLoader
from drumline.data.sharding import Sharding

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Noisy:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


def make(device: str, dataset: Any, *, workers: int = 0) -> IndexedLoader:
    where = torch.device(device)
    sharding = Sharding(batch_size=64, rank=0, world_size=1)
    return IndexedLoader(
        dataset, sharding=sharding, device=where, seed=1, options=LoadingOptions(workers=workers)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_cpu(workers: int) -> None:
    dataset = digits(split="train", augment=True)
    with closing(make("cuda", dataset, workers=workers)) as loader:
        for expected, found in zip(make("cpu", dataset), loader, strict=True):
            for left, right in zip(expected, found, strict=True):
                assert right.is_cuda
                assert torch.equal(left, right.cpu())


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_pass_through_pinned_memory(workers: int) -> None:
    fetch = BatchMaker(digits(split="train", augment=False), seed=0)
    stream = BatchProducer(fetch, LoadingOptions(workers=workers), torch.device("cuda"))
    with closing(stream):
        for batch in stream.batches([BatchRequest(0, 0, 8, shuffled=True)]):
            assert all(tensor.is_pinned() for tensor in batch)


def test_loading_leaves_the_generator_of_the_gpu_alone() -> None:
    before = torch.cuda.get_rng_state()
    assert len(list(make("cuda", Noisy()))) == 1
    assert torch.equal(torch.cuda.get_rng_state(), before)


class Event:
    """In a cycle, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self
        self.event = torch.cuda.Event()
        self.event.record()


class Collecting:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.zeros(3)


def test_a_worker_does_not_free_what_the_rank_has_on_its_gpu() -> None:
    gc.collect()
    gc.disable()
    try:
        Event()
        with closing(make("cuda", Collecting(), workers=1)) as loader:
            assert len(list(loader)) == 1
    finally:
        gc.enable()
