"""Requests become batches: in the right order, with randomness that belongs to the sample."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from drumline.data.dataset import BatchMaker, BatchRequest
from drumline.data.sharding import Draws, permute


class Batches:
    """Notes what it was asked for."""

    def __len__(self) -> int:
        return 100

    def batch(self, indices: np.ndarray, draws: Draws | None) -> tuple[list[int], Any]:
        return indices.tolist(), None if draws is None else draws.uniform(1)[:, 0].tolist()


class Noisy:
    """A map-style dataset as users write them: randomness from the global generators."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "torch": torch.rand(2),
            "random": random.random(),
            "numpy": np.random.rand(),
        }


class Broken:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ValueError("the disk is on fire")


def noise_by_index(fetch: BatchMaker, *requests: BatchRequest) -> dict[int, tuple[float, ...]]:
    noise_of = {}
    for batch in (fetch[request] for request in requests):
        columns = [
            batch["index"],
            batch["torch"][:, 0],
            batch["torch"][:, 1],
            batch["random"],
            batch["numpy"],
        ]
        for index, *noise in zip(*(column.tolist() for column in columns), strict=True):
            noise_of[index] = tuple(noise)
    return noise_of


@pytest.mark.parametrize("shuffled", [True, False])
def test_a_dataset_of_tensors_gives_what_its_samples_collate_to(shuffled: bool) -> None:
    class Read(TensorDataset):
        """It is read sample by sample, because its `__getitem__` might do more."""

    tensors = torch.randn(100, 3, 1), torch.arange(100, dtype=torch.uint8)
    request = BatchRequest(2, 10, 20, shuffled=shuffled)
    whole, read = (BatchMaker(kind(*tensors), seed=3)[request] for kind in (TensorDataset, Read))
    assert type(whole) is type(read) is list
    for whole_part, read_part in zip(whole, read, strict=True):
        assert torch.equal(whole_part, read_part)
        assert (whole_part.dtype, whole_part.stride()) == (read_part.dtype, read_part.stride())


def test_training_gets_the_shuffled_indices_and_their_draws() -> None:
    indices, chances = BatchMaker(Batches(), seed=3)[BatchRequest(2, 10, 20, shuffled=True)]
    expected = permute(np.arange(10, 20), length=100, seed=3, epoch=2)
    assert indices == expected.tolist()
    assert chances == Draws(3, 2, expected).uniform(1)[:, 0].tolist()


def test_evaluation_gets_the_indices_as_they_are_and_no_draws() -> None:
    assert BatchMaker(Batches(), seed=3)[BatchRequest(0, 10, 13, shuffled=False)] == (
        [10, 11, 12],
        None,
    )


def test_noise_of_a_sample_does_not_depend_on_the_batch_it_is_in() -> None:
    fetch = BatchMaker(Noisy(), seed=1)
    whole = noise_by_index(fetch, BatchRequest(0, 0, 100, shuffled=True))
    pieces = noise_by_index(
        fetch, *(BatchRequest(0, low, low + 7, shuffled=True) for low in reversed(range(0, 98, 7)))
    )
    assert len(whole) == 100
    assert len(set(whole.values())) == 100
    assert all(whole[index] == noise for index, noise in pieces.items())


@pytest.mark.parametrize(("seed", "epoch"), [(1, 1), (2, 0)])
def test_noise_differs_by_epoch_and_seed(seed: int, epoch: int) -> None:
    whole = noise_by_index(BatchMaker(Noisy(), seed=1), BatchRequest(0, 0, 100, shuffled=True))
    in_parts = noise_by_index(
        BatchMaker(Noisy(), seed=seed), BatchRequest(epoch, 0, 100, shuffled=True)
    )
    for index in range(100):
        assert all(a != b for a, b in zip(whole[index], in_parts[index], strict=True))


def test_evaluation_noise_is_the_same_each_time() -> None:
    fetch = BatchMaker(Noisy(), seed=0)
    request = BatchRequest(0, 0, 10, shuffled=False)
    assert noise_by_index(fetch, request) == noise_by_index(fetch, request)


def test_the_process_keeps_its_own_randomness() -> None:
    def state() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = state()
    BatchMaker(Noisy(), seed=1)[BatchRequest(0, 0, 10, shuffled=True)]
    assert state() == before
    with pytest.raises(ValueError, match="on fire"):
        BatchMaker(Broken(), seed=1)[BatchRequest(0, 0, 2, shuffled=True)]
    assert state() == before


def test_an_error_in_the_dataset_is_reported_with_the_sample() -> None:
    with pytest.raises(ValueError, match="the disk is on fire") as caught:
        BatchMaker(Broken(), seed=1)[BatchRequest(0, 1, 2, shuffled=False)]
    assert caught.value.__notes__ == ["while reading sample 1 of Broken"]


def test_a_collate_function_of_the_users_own() -> None:
    fetch = BatchMaker([10, 20, 30], seed=0, collate=sum)
    assert fetch[BatchRequest(0, 0, 3, shuffled=True)] == 60
