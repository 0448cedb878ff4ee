"""The shuffled order: a bijection for every length, another one for every seed and epoch."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.data.permutation import permute


def order(length: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    return permute(np.arange(length), length=length, seed=seed, epoch=epoch).tolist()


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 64, 97, 128, 1009, 4096, 4097, 50_000])
def test_every_index_comes_exactly_once(length: int) -> None:
    assert sorted(order(length, seed=3, epoch=5)) == list(range(length))


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_every_index_comes_exactly_once_for_any_seed(length: int, seed: int, epoch: int) -> None:
    assert sorted(order(length, seed=seed, epoch=epoch)) == list(range(length))


@given(length=st.integers(1, 2**30), data=st.data())
def test_a_part_of_the_order_does_not_depend_on_what_else_is_asked(length: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, length - 1))
    positions = np.arange(low, min(low + 50, length))
    together = permute(positions, length=length, seed=1, epoch=2)
    one_by_one = [
        permute(positions[n : n + 1], length=length, seed=1, epoch=2)[0] for n in range(len(positions))
    ]
    assert together.tolist() == one_by_one
    assert len(set(together.tolist())) == len(positions)
    assert together.min() >= 0
    assert together.max() < length


def test_the_order_differs_by_seed_and_by_epoch_and_is_not_the_order_of_the_file() -> None:
    orders = [order(1000), order(1000, epoch=1), order(1000, seed=1), list(range(1000))]
    for one, other in itertools.combinations(orders, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 12


def test_positions_are_left_as_they_are() -> None:
    positions = np.arange(100)
    permute(positions, length=100, seed=0, epoch=0)
    assert positions.tolist() == list(range(100))


def test_the_order_is_a_promise_to_old_checkpoints() -> None:
    assert order(10, seed=7, epoch=3) == [3, 1, 6, 8, 4, 2, 7, 5, 9, 0]


@pytest.mark.parametrize("length", [3, 4, 5])
def test_every_order_of_a_few_samples_is_about_as_likely(length: int) -> None:
    runs = 6000
    seen = Counter(tuple(order(length, seed=seed)) for seed in range(runs))
    orders = list(itertools.permutations(range(length)))
    expected = runs / len(orders)
    chi_square = sum((seen[one] - expected) ** 2 / expected for one in orders)
    freedom = len(orders) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_batches_of_a_sorted_dataset_are_mixed() -> None:
    """50,000 samples sorted by class, in batches of 50: class counts vary as they would by chance."""
    classes = np.array(order(50_000)).reshape(-1, 50) // 5000
    counts = np.stack([(classes == number).sum(axis=1) for number in range(10)])
    assert 0.9 < counts.var() / (50 * 0.1 * 0.9) < 1.1
    neighbours = np.array(order(50_000))
    assert abs(np.corrcoef(neighbours[1:], neighbours[:-1])[0, 1]) < 0.03
