"""What may be used as a dataset, and the sentence for what may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from drumline.base.errors import DataError, UsageError
from drumline.data.dataset import (
    BatchDataset,
    checked_length,
    is_resumable,
    is_stream,
    makes_batches,
)
from drumline.data.sharding import Draws


class Batches:
    def __len__(self) -> int:
        return 5

    def batch(self, indices: np.ndarray, draws: Draws | None) -> Any:
        return indices


class WithABatchSize(list[int]):
    batch = 64


class Rows(list[int]):
    """Like a `datasets.Dataset` of Hugging Face, which groups its rows by this."""

    def batch(self, batch_size: int | None = None, drop_last_batch: bool = False) -> Rows:
        raise AssertionError("the loader makes the batches")


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


class Resumable(Endless):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Unfinished(Dataset[int]):
    def __len__(self) -> int:
        return 3


def test_both_kinds_are_accepted() -> None:
    assert isinstance(Batches(), BatchDataset)
    assert makes_batches(Batches())
    assert checked_length(Batches()) == 5
    assert checked_length([1, 2, 3]) == 3


def test_something_else_named_batch_does_not_make_a_batch_dataset() -> None:
    for dataset in (WithABatchSize([1, 2]), Rows([1, 2])):
        assert not makes_batches(dataset)
        assert checked_length(dataset) == 2


def test_what_is_no_dataset_at_all_is_refused_with_what_is_needed() -> None:
    with pytest.raises(
        UsageError, match="object cannot be used as a dataset: it has no __len__ and no __getitem__"
    ) as caught:
        checked_length(object())
    assert "give it __len__(self) and __getitem__(self, index)" in str(caught.value)
    assert "or for a stream __iter__(self)" in str(caught.value)


def test_a_stream_is_what_can_only_be_iterated() -> None:
    assert is_stream(Endless())
    assert is_stream({1, 2})
    for dataset in (Batches(), [1, 2], TensorDataset(torch.zeros(2)), Unfinished(), object()):
        assert not is_stream(dataset)


def test_a_stream_is_resumable_if_its_place_can_be_saved_and_restored() -> None:
    assert is_resumable(Resumable())
    assert not is_resumable(Endless())


def test_the_getitem_that_torch_brings_does_not_count() -> None:
    with pytest.raises(
        UsageError, match="Unfinished cannot be used as a dataset: it has no __getitem__"
    ):
        checked_length(Unfinished())


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="the dataset TensorDataset is empty"):
        checked_length(TensorDataset(torch.zeros(0, 2)))
