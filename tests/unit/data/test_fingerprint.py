"""Fingerprints: equal for equal data, different for different data, quiet about data that is never
the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drumline.base.errors import DataError
from drumline.data.dataset import fingerprint
from drumline.data.images import digits
from drumline.data.sharding import Draws


class Thing:
    pass


class OwnGenerator:
    """Random in a way that no global seed decides."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng().random(3)


class GlobalGenerator(OwnGenerator):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


def samples(last: Any) -> list[Any]:
    return [(torch.arange(3), {"name": "a", "label": number}) for number in range(9)] + [last]


def test_it_says_the_length_and_is_short() -> None:
    text = fingerprint(digits(split="eval", augment=True))
    assert text.startswith("360 samples, ")
    assert len(text) < 40
    assert text == fingerprint(digits(split="eval", augment=True))


def test_parts_of_a_dataset_differ() -> None:
    assert fingerprint(digits(split="eval", augment=False)) != fingerprint(
        digits(split="train", augment=False)
    )


@pytest.mark.parametrize(
    ("sample", "changed"),
    [
        (torch.zeros(3), torch.tensor([0, 0, 1e-7])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (torch.zeros(1, 3)[:, -1], torch.ones(1, 3)[:, -1]),
        (np.zeros(3), np.ones(3)),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1, 3]),
        (("ab", "c"), ("a", "bc")),
        (b"x", "x"),
        ({"a", "b"}, {"a", "c"}),
        (frozenset([1]), frozenset()),
        (Thing(), 3),
    ],
)
def test_one_sample_that_differs_is_noticed(sample: Any, changed: Any) -> None:
    assert fingerprint(samples(sample)) == fingerprint(samples(sample))
    assert fingerprint(samples(sample)) != fingerprint(samples(changed))


def test_the_order_of_a_set_does_not_count() -> None:
    # 8 and 16 collide in a small set, which then iterates in the order of insertion.
    assert list({8, 16}) != list({16, 8})
    assert fingerprint([{8, 16}]) == fingerprint([{16, 8}])


def test_a_sample_more_is_noticed() -> None:
    assert fingerprint([1] * 10) != fingerprint([1] * 11)


def test_objects_count_by_their_kind_only() -> None:
    assert fingerprint(samples(Thing())) == fingerprint(samples(Thing()))


@pytest.mark.parametrize("dataset", [OwnGenerator(), GlobalGenerator()])
def test_randomness_is_no_difference(dataset: Any) -> None:
    assert fingerprint(dataset) == fingerprint(dataset)


def test_a_dataset_that_makes_batches_is_asked_without_chance() -> None:
    class Batches:
        def __len__(self) -> int:
            return 4

        def batch(self, indices: np.ndarray, draws: Draws | None) -> torch.Tensor:
            assert draws is None
            return torch.from_numpy(indices)

    assert fingerprint(Batches()).startswith("4 samples, ")


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="is empty"):
        fingerprint([])


def test_a_stream_is_named_and_not_read() -> None:
    class Unread:
        def __iter__(self) -> Any:
            raise AssertionError("it was read")

    class Resumable(Unread):
        state_dict = load_state_dict = print

    assert fingerprint(Unread()).startswith("a stream, ")
    assert fingerprint(Unread()).endswith("Unread")
    assert fingerprint(Resumable()).startswith("a resumable stream, ")
