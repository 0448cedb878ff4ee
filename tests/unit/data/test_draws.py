"""Per-sample randomness: decided by seed, epoch, index and stream, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from drumline.data.sharding import Draws


def test_a_sample_has_its_numbers_whatever_batch_it_is_in() -> None:
    alone = Draws(1, 2, np.array([7])).uniform(5)
    among = Draws(1, 2, np.array([3, 7, 11])).uniform(5)
    assert alone[0].tolist() == among[1].tolist()


def test_asking_for_more_numbers_keeps_the_first() -> None:
    draws = Draws(1, 2, np.arange(4))
    assert draws.uniform(9)[:, :3].tolist() == draws.uniform(3).tolist()


@pytest.mark.parametrize(
    "changed",
    [Draws(2, 2, np.arange(64)), Draws(1, 3, np.arange(64)), Draws(1, 2, np.arange(64, 128))],
)
def test_another_seed_epoch_or_index_gives_other_numbers(changed: Draws) -> None:
    assert not np.intersect1d(Draws(1, 2, np.arange(64)).bits(8), changed.bits(8)).size


def test_streams_are_independent() -> None:
    draws = Draws(0, 0, np.arange(50_000))
    first_stream = draws.uniform(1)[:, 0]
    second_stream = draws.uniform(1, stream=1)[:, 0]
    assert abs(np.corrcoef(first_stream, second_stream)[0, 1]) < 0.02


def test_numbers_are_uniform_and_uncorrelated() -> None:
    numbers = Draws(0, 0, np.arange(50_000)).uniform(4)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    histogram, _ = np.histogram(numbers, bins=100, range=(0, 1))
    # chi-square, 99 degrees of freedom
    assert ((histogram - 2000) ** 2 / 2000).sum() < 170
    between_numbers = np.corrcoef(numbers.T) - np.eye(4)
    between_samples = np.corrcoef(numbers[1:, 0], numbers[:-1, 0])[0, 1]
    assert abs(between_numbers).max() < 0.02
    assert abs(between_samples) < 0.02


def test_every_bit_is_set_half_of_the_time() -> None:
    bits = Draws(5, 0, np.arange(20_000)).bits(1)[:, 0]
    shares = [((bits >> np.uint64(bit)) & np.uint64(1)).mean() for bit in range(64)]
    assert max(abs(share - 0.5) for share in shares) < 0.02


def test_the_numbers_are_a_promise_to_old_checkpoints() -> None:
    assert [f"{bits:016x}" for bits in Draws(1, 2, np.array([3])).bits(2)[0].tolist()] == [
        "b61a953a45a5c6fb",
        "889859e39d226025",
    ]


def test_large_and_negative_seeds_are_accepted() -> None:
    assert Draws(2**70, 0, np.arange(2)).bits(1).shape == (2, 1)
    assert Draws(-1, 0, np.arange(2)).bits(1).shape == (2, 1)
