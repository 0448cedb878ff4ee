"""Hashes of samples and tensors: the same for the same bits, whatever the batch they come in."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from drumline.training.between_steps.trace import hash_json, hash_samples, hash_tensor

Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Named:
    points: torch.Tensor
    name: str


class Plain:
    __slots__ = ()


class Graph:
    def __init__(self, points: torch.Tensor) -> None:
        self.points = points
        self.whole = self


def rows(*numbers: float) -> torch.Tensor:
    return torch.tensor([[number, 1.0] for number in numbers])


def test_a_tensor_is_its_bits_its_type_and_its_shape() -> None:
    numbers = torch.arange(6, dtype=torch.float32)
    hash_of_copy = hash_tensor(numbers.clone())
    assert hash_tensor(numbers) == hash_of_copy
    assert hash_tensor(numbers.reshape(2, 3).t().contiguous().t().reshape(-1)) == hash_of_copy
    variants = [
        numbers.reshape(2, 3),
        numbers.double(),
        numbers.view(torch.int32),
        -numbers,
        numbers[:5],
    ]
    assert len({hash_of_copy, *map(hash_tensor, variants)}) == len(variants) + 1
    assert hash_tensor(torch.tensor(float("nan"))) == hash_tensor(torch.tensor(float("nan")))
    assert hash_tensor(torch.eye(2).to_sparse()) == hash_tensor(torch.eye(2).to_sparse())
    assert hash_tensor(torch.zeros(0)) != hash_tensor(torch.zeros(()))


def test_a_document_is_what_it_holds() -> None:
    assert hash_json({"a": 1, "b": 2}) == hash_json({"b": 2, "a": 1}) != hash_json({"a": 1, "b": 3})


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: (x, x[:, 0]),
        lambda x: {"image": x, "more": [x.long(), (x,)]},
        lambda x: Pair(x, x[:, 0]),
        lambda x: Named(x, "all"),
        lambda x: Graph(x),
        lambda x: x.numpy(),
    ],
)
def test_a_sample_is_the_same_in_any_batch_of_its_kind(make: Any) -> None:
    together, rest = hash_samples(make(rows(1, 2, 3)), 3)
    alone = [hash_samples(make(rows(number)), 1) for number in (1, 2, 3)]
    assert together == [samples[0] for samples, _ in alone]
    assert {rest} == {digest for _, digest in alone}
    assert len(set(together)) == 3


def test_what_is_not_of_a_sample_is_hashed_once() -> None:
    batch = {
        "x": rows(1, 2),
        "epoch": 3,
        "weights": torch.ones(5),
        "names": ["b", "a"],
        "none": None,
    }
    samples, rest = hash_samples(batch, 2)
    for name, variant in {
        "epoch": 4,
        "weights": torch.zeros(5),
        "names": ["a"],
        "none": Plain(),
        "more": 1,
    }.items():
        changed = hash_samples({**batch, name: variant}, 2)
        assert changed[0] == samples, name
        assert changed[1] != rest, name
    assert hash_samples({"x": Plain()}, 2)[1] == hash_samples({"x": Plain()}, 2)[1]
    assert hash_samples(np.array(["a", "b"]), 2)[1] != hash_samples(np.array(["a", "c"]), 2)[1]
