"""The evaluation loader: every sample once over all ranks, the same batches on any world, nothing
random."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.base.errors import DataError, UsageError
from drumline.data.delivery import LoadingOptions
from drumline.data.loader import IndexedEvaluationLoader
from drumline.data.sharding import Draws, Sharding

pytestmark = [
    # Python 3.12 warns about every fork of a process with threads; torch's worker processes are
    # forked.
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    # torch warns about more workers than cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Indices:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: np.ndarray, draws: Draws | None) -> torch.Tensor:
        assert draws is None
        return torch.from_numpy(indices)


class Noisy:
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


def make(
    dataset: Any, *, batch_size: int = 4, rank: int = 0, world_size: int = 1, workers: int = 0
) -> IndexedEvaluationLoader:
    sharding = Sharding(batch_size=batch_size, rank=rank, world_size=world_size)
    return IndexedEvaluationLoader(
        dataset,
        sharding=sharding,
        device=torch.device("cpu"),
        options=LoadingOptions(workers=workers),
    )


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5))
def test_every_sample_comes_once_and_batches_are_the_same_on_any_world(
    length: int, batch_size: int, world_size: int
) -> None:
    batches: dict[int, list[int]] = {}
    for rank in range(world_size):
        loader = make(Indices(length), batch_size=batch_size, rank=rank, world_size=world_size)
        for number, size, data in loader.numbered():
            assert number not in batches
            assert len(data) == size
            batches[number] = data.tolist()
        assert loader.num_batches == -(-length // batch_size)
        assert loader.num_samples == length
    alone = make(Indices(length), batch_size=batch_size)
    assert [batches[number] for number in sorted(batches)] == [data.tolist() for data in alone]
    assert [index for number in sorted(batches) for index in batches[number]] == list(range(length))


def test_a_rank_may_have_nothing_to_do() -> None:
    loader = make(Indices(5), rank=2, world_size=3)
    assert len(loader) == 0
    assert list(loader) == []


def test_a_padded_pass_has_the_same_number_of_batches_on_every_rank() -> None:
    sizes = [
        [
            batch.size
            for batch in make(Indices(length), rank=rank, world_size=3).numbered(padded=True)
        ]
        for length in (5, 12, 13)
        for rank in range(3)
    ]
    assert sizes == [[4], [1], [0], [4], [4], [4], [4, 1], [4, 0], [4, 0]]
    (pad,) = make(Indices(5), rank=2, world_size=3).numbered(padded=True)
    assert pad.data.tolist() == [0]


def test_every_pass_is_the_same_with_and_without_workers() -> None:
    alone = make(Noisy())
    expected = list(alone)
    assert len(alone) == len(expected) == 3
    with closing(make(Noisy(), workers=2)) as loader:
        for _ in range(2):
            for expected_batch, batch in zip(expected, loader, strict=True):
                assert torch.equal(expected_batch, batch)


def test_a_pass_that_is_left_early_starts_over() -> None:
    with closing(make(Indices(11), workers=1)) as loader:
        next(iter(loader))
        assert torch.cat(list(loader)).tolist() == list(range(11))


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="the dataset Indices is empty"):
        make(Indices(0))


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="evaluation batches cannot have 0 samples"):
        make(Indices(3), batch_size=0)
