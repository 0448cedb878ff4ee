"""Evaluation on a stream: every sample once over all ranks, in the same batches on any world, the
same each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.base.errors import DataError, UsageError
from drumline.data.delivery import LoadingOptions
from drumline.data.loader import StreamEvaluationLoader
from drumline.data.sharding import Sharding

# Python 3.12 warns about every fork of a process with threads; torch's worker processes are forked.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.length))


class Noisy:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(3) for _ in range(11))


def make(
    dataset: Any, *, batch_size: int = 4, rank: int = 0, world_size: int = 1, **options: Any
) -> StreamEvaluationLoader:
    sharding = Sharding(batch_size=batch_size, rank=rank, world_size=world_size)
    return StreamEvaluationLoader(
        dataset, sharding=sharding, device=torch.device("cpu"), options=LoadingOptions(**options)
    )


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5))
def test_every_sample_comes_once_and_batches_are_the_same_on_any_world(
    length: int, batch_size: int, world_size: int
) -> None:
    batches: dict[int, list[int]] = {}
    for rank in range(world_size):
        loader = make(Numbers(length), batch_size=batch_size, rank=rank, world_size=world_size)
        for number, size, data in loader.numbered():
            assert number not in batches
            assert number % world_size == rank
            assert len(data) == size
            batches[number] = data.tolist()
        assert loader.num_batches == -(-length // batch_size)
        assert loader.num_samples == length
    expected = [
        list(range(low, min(low + batch_size, length))) for low in range(0, length, batch_size)
    ]
    assert [batches[number] for number in range(len(batches))] == expected


def test_a_padded_pass_has_the_same_number_of_batches_on_every_rank() -> None:
    loaders = [make(Numbers(13), rank=rank, world_size=3) for rank in range(3)]
    assert [[batch.size for batch in loader.numbered(padded=True)] for loader in loaders] == [
        [4, 1],
        [4, 0],
        [4, 0],
    ]
    assert [loader.num_samples for loader in loaders] == [13] * 3


@pytest.mark.parametrize("persistent", [True, False])
def test_every_pass_is_the_same_with_and_without_a_worker(persistent: bool) -> None:
    expected = list(make(Noisy()))
    assert len(expected) == 3
    with closing(make(Noisy(), workers=2, persistent_workers=persistent)) as loader:
        for _ in range(2):
            for expected_batch, batch in zip(expected, loader, strict=True):
                assert torch.equal(expected_batch, batch)


def test_a_pass_that_is_left_early_starts_over() -> None:
    with closing(make(Numbers(11), workers=1)) as loader:
        next(iter(loader))
        assert torch.cat(list(loader)).tolist() == list(range(11))


def test_how_many_there_are_is_known_when_all_are_read() -> None:
    loader = make(Numbers(11))
    assert loader.num_samples is None
    for ask in (lambda: loader.num_batches, lambda: len(loader)):
        with pytest.raises(UsageError, match="the length of the stream Numbers is not known"):
            ask()
    list(loader)
    assert (loader.num_samples, loader.num_batches) == (11, 3)


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(DataError, match="the stream Numbers is empty"):
        list(make(Numbers(0)))


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="evaluation batches cannot have 0 samples"):
        make(Numbers(3), batch_size=0)
