from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from drumline.base.errors import CheckpointError, UsageError
from drumline.rank.determinism import RNG_BYTES, capture_rng, restore_rng

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    before = capture_rng(CPU)
    yield
    restore_rng(before, CPU)


def draw() -> list[object]:
    return [
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        torch.randperm(9).tolist(),
        np.random.rand(3).tolist(),
        np.random.randn(),
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(64),
    ]


@pytest.mark.parametrize("draws_before", [0, 1, 700])
def test_the_next_draws_are_the_same(draws_before: int) -> None:
    """An odd number of normal draws leaves a second one waiting in each generator; 700 crosses a
    refill."""
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)
    for _ in range(draws_before):
        draw()
    state = capture_rng(CPU)
    expected = [draw() for _ in range(5)]
    torch.manual_seed(30)
    np.random.seed(40)
    random.seed(50)
    draw()
    restore_rng(state, CPU)
    assert [draw() for _ in range(5)] == expected


def test_a_replaced_generator_of_numpy_is_refused() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(UsageError, match="numpy's global generator was replaced"):
            capture_rng(CPU)
    finally:
        np.random.set_bit_generator(before)


def test_looking_at_the_state_does_not_change_it() -> None:
    assert torch.equal(capture_rng(CPU), capture_rng(CPU))


def test_every_rank_s_state_has_one_length() -> None:
    state = capture_rng(CPU)
    assert (state.shape, state.dtype, state.device) == ((RNG_BYTES,), torch.uint8, CPU)
    draw()
    assert capture_rng(CPU).shape == state.shape


def test_it_survives_a_gather() -> None:
    state = capture_rng(CPU)
    expected = draw()
    restore_rng(torch.stack([torch.zeros_like(state), state])[1], CPU)
    assert draw() == expected


@pytest.mark.parametrize(
    "state", [torch.zeros(5, dtype=torch.uint8), torch.zeros(RNG_BYTES, dtype=torch.uint8)]
)
def test_what_is_no_random_state(state: torch.Tensor) -> None:
    with pytest.raises(
        CheckpointError, match="the saved random state is corrupt: it is no random state"
    ):
        restore_rng(state, CPU)


def test_a_later_version() -> None:
    state = capture_rng(CPU)
    state[8] = 9
    what = r"it is a random state of another version of Drumline \(format 9, expected 1\)"
    with pytest.raises(CheckpointError, match=what):
        restore_rng(state, CPU)


def test_the_state_of_another_torch() -> None:
    state = capture_rng(CPU)
    state[12] += 1  # the length of torch's part
    what = r"it is no random state of this version of torch \(12288 bytes\)"
    with pytest.raises(CheckpointError, match=what):
        restore_rng(state, CPU)
