"""What may be used as a dataset, and the sentence for what may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from drumline.data.dataset import BatchDataset, checked_length, makes_batches
from drumline.data.draws import Draws
from drumline.errors import DataError, UsageError


class Batches:
    def __len__(self) -> int:
        return 5

    def batch(self, indices: np.ndarray, draws: Draws | None) -> Any:
        return indices


class WithABatchSize(list[int]):
    batch = 64


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


class Unfinished(Dataset[int]):
    def __len__(self) -> int:
        return 3


def test_both_kinds_are_accepted() -> None:
    assert isinstance(Batches(), BatchDataset)
    assert makes_batches(Batches())
    assert checked_length(Batches()) == 5
    assert checked_length([1, 2, 3]) == 3


def test_an_attribute_named_batch_does_not_make_a_batch_dataset() -> None:
    assert not makes_batches(WithABatchSize([1, 2]))
    assert checked_length(WithABatchSize([1, 2])) == 2


def test_a_stream_is_refused_with_what_is_needed() -> None:
    with pytest.raises(
        UsageError, match="Endless cannot be used as a dataset: it has no __len__ and no __getitem__"
    ) as caught:
        checked_length(Endless())
    assert "give it __len__(self) and __getitem__(self, index)" in str(caught.value)


def test_the_getitem_that_torch_brings_does_not_count() -> None:
    with pytest.raises(UsageError, match="Unfinished cannot be used as a dataset: it has no __getitem__"):
        checked_length(Unfinished())


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="the dataset TensorDataset is empty"):
        checked_length(TensorDataset(torch.zeros(0, 2)))
