"""The shuffled order: a bijection for every length, another one for every seed and epoch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from drumline.data.sharding import _ROUND_PAIRS, _Grid, _grid, permute


def order(length: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    return permute(np.arange(length), length=length, seed=seed, epoch=epoch).tolist()


def invert(indices: NDArray[np.int64], *, length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The positions of these samples: the inverse of `permute`."""
    grid = _grid(length, seed, epoch)
    positions = unshuffle(indices, grid)
    while (outside := positions >= length).any():
        positions[outside] = unshuffle(positions[outside], grid)
    return positions


def unshuffle(cells: NDArray[np.int64], grid: _Grid) -> NDArray[np.int64]:
    """The rounds of a shuffle in reverse, each undone by subtracting what it added."""
    row, column = np.divmod(cells, grid.columns)
    for row_shift, column_shift in zip(
        grid.row_shifts[::-1], grid.column_shifts[::-1], strict=True
    ):
        column = (column - column_shift[row]) % grid.columns
        row = (row - row_shift[column]) % grid.rows
    return row * grid.columns + column


def test_every_index_comes_exactly_once_for_every_length_up_to_600_and_many_more() -> None:
    for length in (*range(600), *range(600, 10_001, 61)):
        indices = permute(np.arange(length), length=length, seed=3, epoch=length)
        assert (np.bincount(indices, minlength=length) == 1).all(), length


def some_lengths() -> list[int]:
    """Of every magnitude up to 2**40, by chance but always the same ones, and where grids are full
    or nearly so."""
    chance = np.random.default_rng(11)
    random = [int(2.0**exponent) for exponent in chance.uniform(1, 40, size=25)]
    return [*random, 1, 2, 2**31 - 1, 2**32, 99_999**2, 99_999**2 + 1, 2**40 - 1, 2**40]


@pytest.mark.parametrize("length", some_lengths())
def test_it_is_a_bijection_of_any_length_up_to_2_to_the_40(length: int) -> None:
    """What has an inverse on both sides is a bijection; a sample of both is looked at."""
    where = {"length": length, "seed": 5, "epoch": 9}
    sample = np.unique(
        np.append(np.random.default_rng(length).integers(0, length, 500), [0, length - 1])
    )
    for function, inverse in ((permute, invert), (invert, permute)):
        images = function(sample, **where)
        assert images.min() >= 0
        assert images.max() < length
        assert len(np.unique(images)) == len(sample)
        assert inverse(images, **where).tolist() == sample.tolist()
    _grid.cache_clear()  # that of 2**40 takes 100 megabytes


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_the_inverse_tells_where_each_sample_stands(length: int, seed: int, epoch: int) -> None:
    where = {"length": length, "seed": seed, "epoch": epoch}
    everything = np.arange(length)
    assert invert(permute(everything, **where), **where).tolist() == everything.tolist()
    assert permute(invert(everything, **where), **where).tolist() == everything.tolist()


def test_no_positions_have_no_samples() -> None:
    assert permute(np.arange(0), length=0, seed=0, epoch=0).tolist() == []


def test_10_billion_samples_need_ten_megabytes() -> None:
    length = 10**10
    positions = np.arange(length - 1000, length)
    indices = permute(positions, length=length, seed=0, epoch=0)
    assert len(set(indices.tolist())) == 1000
    assert indices.max() < length
    grid = _grid(length, 0, 0)
    assert grid.row_shifts.shape == grid.column_shifts.shape == (_ROUND_PAIRS, 100_000)
    assert grid.row_shifts.nbytes + grid.column_shifts.nbytes < 10_000_000


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_every_index_comes_exactly_once_for_any_seed(length: int, seed: int, epoch: int) -> None:
    assert sorted(order(length, seed=seed, epoch=epoch)) == list(range(length))


@given(length=st.integers(1, 2**30), data=st.data())
def test_a_part_of_the_order_does_not_depend_on_what_else_is_asked(
    length: int, data: st.DataObject
) -> None:
    low = data.draw(st.integers(0, length - 1))
    positions = np.arange(low, min(low + 50, length))
    together = permute(positions, length=length, seed=1, epoch=2)
    one_by_one = [
        permute(positions[n : n + 1], length=length, seed=1, epoch=2)[0]
        for n in range(len(positions))
    ]
    assert together.tolist() == one_by_one
    assert len(set(together.tolist())) == len(positions)
    assert together.min() >= 0
    assert together.max() < length


def test_the_order_differs_by_seed_and_by_epoch_and_is_not_the_order_of_the_file() -> None:
    orders = [order(1000), order(1000, epoch=1), order(1000, seed=1), list(range(1000))]
    for left, right in itertools.combinations(orders, 2):
        assert sum(a == b for a, b in zip(left, right, strict=True)) < 12


def test_positions_are_left_as_they_are() -> None:
    positions = np.arange(100)
    permute(positions, length=100, seed=0, epoch=0)
    assert positions.tolist() == list(range(100))


def test_the_order_is_a_promise_to_old_checkpoints() -> None:
    assert order(10, seed=7, epoch=3) == [3, 1, 6, 8, 4, 2, 7, 5, 9, 0]


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 4, 5])
def test_every_order_of_a_few_samples_is_about_as_likely(length: int) -> None:
    orders = list(itertools.permutations(range(length)))
    runs = min(100 * len(orders), 3000)
    counts = Counter(tuple(order(length, seed=seed)) for seed in range(runs))
    expected = runs / len(orders)
    chi_square = sum((counts[permutation] - expected) ** 2 / expected for permutation in orders)
    freedom = len(orders) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_batches_of_a_sorted_dataset_are_mixed() -> None:
    """50,000 samples sorted by class, in batches of 50: class counts vary as they would by
    chance."""
    classes = np.array(order(50_000)).reshape(-1, 50) // 5000
    counts = np.stack([(classes == number).sum(axis=1) for number in range(10)])
    assert 0.9 < counts.var() / (50 * 0.1 * 0.9) < 1.1
    neighbours = np.array(order(50_000))
    assert abs(np.corrcoef(neighbours[1:], neighbours[:-1])[0, 1]) < 0.03


BINS = 64
LARGE = 10**9 + 7


def assert_unrelated(left: NDArray[np.int64], right: NDArray[np.int64]) -> None:
    """Chi-square of two numbers in [0, BINS) each: no pair is more or less frequent than chance
    makes it."""
    counts = np.bincount(left * BINS + right, minlength=BINS * BINS).reshape(BINS, BINS)
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / counts.sum()
    assert expected.min() > 50
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (BINS - 1) ** 2
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def block(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """In which of equal parts of the dataset they lie."""
    return numbers * BINS // LARGE


def low_bits(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return numbers % BINS


def column(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where in a row of the grid."""
    columns = _grid(LARGE, 0, 0).columns
    return numbers % columns * BINS // columns


VIEWS = [block, low_bits, column]
View = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def large_order(positions: NDArray[np.int64], *, epoch: int = 0) -> NDArray[np.int64]:
    return permute(positions, length=LARGE, seed=0, epoch=epoch)


@pytest.fixture(scope="module")
def positions() -> NDArray[np.int64]:
    return np.random.default_rng(2).integers(0, LARGE - 10**5, size=400_000)


@pytest.fixture(scope="module")
def samples(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return large_order(positions)


@pytest.mark.parametrize("of_position", VIEWS)
@pytest.mark.parametrize("of_index", VIEWS)
def test_a_position_tells_nothing_of_its_sample(
    positions: NDArray[np.int64], samples: NDArray[np.int64], of_position: View, of_index: View
) -> None:
    assert_unrelated(of_position(positions), of_index(samples))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lag", [1, 2, 3, 64, _grid(LARGE, 0, 0).columns, _grid(LARGE, 0, 0).columns + 1]
)
@pytest.mark.parametrize("view", VIEWS)
def test_a_sample_tells_nothing_of_the_one_after_it(
    positions: NDArray[np.int64], samples: NDArray[np.int64], lag: int, view: View
) -> None:
    """Nor of the next but one, nor of the one below it in the grid."""
    assert_unrelated(view(samples), view(large_order(positions + lag)))


@pytest.mark.parametrize("view", VIEWS)
def test_an_epoch_tells_nothing_of_the_next(
    positions: NDArray[np.int64], samples: NDArray[np.int64], view: View
) -> None:
    assert_unrelated(view(samples), view(large_order(positions, epoch=1)))


def test_each_epoch_has_another_order() -> None:
    orders = np.stack([order(1000, epoch=epoch) for epoch in range(60)])
    for left, right in itertools.combinations(orders, 2):
        assert (left == right).sum() < 12


def test_the_test_of_mixing_finds_what_is_not_mixed(positions: NDArray[np.int64]) -> None:
    with pytest.raises(AssertionError):
        assert_unrelated(block(positions), block((positions * 3 + 1) % LARGE))
