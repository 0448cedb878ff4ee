"""Batches ahead of the step: how far, in what order, and errors that keep their place. (Streams:
tests/gpu.)"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from drumline.data.delivery import Delivery, LoadingOptions, can_change_streams, leaves, prefetch
from drumline.data.loader import IndexedLoader
from drumline.data.sharding import Cursor, Draws, Sharding
from drumline.data.stream_loader import StreamLoader

CPU = torch.device("cpu")


def noted(count: int, requested: list[int], *, fails_at: int | None = None) -> Iterator[int]:
    for number in range(count):
        requested.append(number)
        if number == fails_at:
            raise KeyError(f"no image {number}")
        yield number


def test_two_more_are_asked_for_than_are_handed_out() -> None:
    requested: list[int] = []
    delivered = []
    for number in prefetch(noted(5, requested), lambda number: number * 10, count=2):
        delivered.append(number)
        assert len(requested) == min(5, len(delivered) + 2)
    assert delivered == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_an_error_comes_in_place_of_its_own_batch(fails_at: int) -> None:
    ahead = prefetch(noted(5, [], fails_at=fails_at), lambda number: number, count=2)
    assert list(itertools.islice(ahead, fails_at)) == list(range(fails_at))
    with pytest.raises(KeyError, match=f"no image {fails_at}"):
        next(ahead)


def test_what_fails_on_its_way_keeps_its_place_too() -> None:
    ahead = prefetch(iter([1, 2, 0, 4]), lambda number: 1 / number, count=2)
    assert [next(ahead), next(ahead)] == [1.0, 0.5]
    with pytest.raises(ZeroDivisionError):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_on_the_cpu_nothing_is_asked_for_ahead() -> None:
    requested: list[int] = []
    batches = Delivery(CPU, lambda number: number + 1).batches(noted(3, requested))
    assert [next(batches), next(batches)] == [1, 2]
    assert requested == [0, 1]


class Indices:
    """Samples that are their own index."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.num_batches = 0

    def __len__(self) -> int:
        return 23

    def batch(self, indices: np.ndarray, draws: Draws | None) -> torch.Tensor:
        self.num_batches += 1
        if self.num_batches == self.fails_at:
            raise OSError("the disk is gone")
        return torch.from_numpy(indices)


class AheadOnTheCpu(Delivery):
    """What a GPU does, but for the streams."""

    def batches(self, answers: Iterator[Any]) -> Iterator[Any]:
        return map(self._receive, prefetch(answers, self._send, count=2))


def make(dataset: Any, *, ahead: bool, **options: Any) -> IndexedLoader:
    sharding = Sharding(batch_size=6, rank=0, world_size=1, accumulate=2)
    loader = IndexedLoader(
        dataset, sharding=sharding, device=CPU, seed=4, options=LoadingOptions(**options)
    )
    if ahead:
        loader._delivery = AheadOnTheCpu(CPU, lambda batch: batch)
    return loader


def test_looking_ahead_changes_no_batch_and_not_the_cursor() -> None:
    plain = make(Indices(), ahead=False)
    ahead = make(Indices(), ahead=True)
    for _ in range(3):  # into the next epoch too
        for expected, step in zip(plain.steps(), ahead.steps(), strict=True):
            assert expected.plan == step.plan
            for plain_micro, ahead_micro in zip(
                expected.micro_batches, step.micro_batches, strict=True
            ):
                assert torch.equal(plain_micro.data, ahead_micro.data)
                assert plain.cursor == ahead.cursor
    assert ahead.cursor == Cursor(3, 0)


def test_a_step_given_up_and_a_cursor_set_again_drop_what_was_made_ahead() -> None:
    plain = make(Indices(), ahead=False)
    ahead = make(Indices(), ahead=True)
    for loader in (plain, ahead):
        next(iter(loader))  # one of a step's two
    assert torch.equal(ahead.preview(), plain.preview())
    for loader in (plain, ahead):
        loader.cursor = Cursor(1, 12)
    for plain_batch, ahead_batch in zip(plain, ahead, strict=True):
        assert torch.equal(plain_batch, ahead_batch)


def test_an_error_ahead_leaves_the_steps_before_it_whole() -> None:
    loader = make(Indices(fails_at=6), ahead=True)
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader)
    # two steps of two batches; the fifth is of the step that failed
    assert loader.cursor == Cursor(0, 12)


def test_the_time_spent_waiting_is_counted() -> None:
    loader = make(Indices(), ahead=False)
    assert loader.waited_s == 0
    list(loader)
    assert loader.waited_s > 0


@dataclass
class Hides:
    inside: torch.Tensor


class Moves:
    def to(self, device: torch.device, non_blocking: bool) -> Moves:
        return self


def test_only_what_can_change_streams_is_sent_ahead() -> None:
    batch = {"images": torch.ones(2), "rest": [torch.ones(1), "a name", 3], "none": None}
    assert [leaf.numel() for leaf in leaves(batch)] == [2, 1]
    assert can_change_streams(batch)
    assert can_change_streams((np.ones(2), True, np.float32(1), b"bytes"))
    assert not can_change_streams((torch.ones(1), Moves()))
    assert not can_change_streams([torch.ones(1), Hides(torch.ones(1))])


class Numbers:
    """A stream of 23 samples."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(23))


def test_of_a_stream_only_the_step_in_work_is_sent_ahead() -> None:
    sharding = Sharding(batch_size=6, rank=0, world_size=1, accumulate=3)
    loaders = [
        StreamLoader(Numbers(), sharding=sharding, device=CPU, seed=4, options=LoadingOptions())
        for _ in range(2)
    ]
    plain, ahead = loaders
    sent: list[Any] = []
    ahead._delivery = AheadOnTheCpu(CPU, lambda batch: sent.append(batch) or batch)
    for _ in range(2):
        for expected, step in zip(plain.steps(), ahead.steps(), strict=True):
            assert expected.plan == step.plan
            for plain_micro, ahead_micro in zip(
                expected.micro_batches, step.micro_batches, strict=True
            ):
                assert torch.equal(plain_micro.data, ahead_micro.data)
                assert plain.cursor == ahead.cursor
            assert torch.cat(sent).tolist() == list(range(step.plan.start, step.plan.stop))
            sent.clear()
    assert ahead.cursor == Cursor(2, 0)
