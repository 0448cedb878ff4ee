"""Training from a stream: the same global batches on any world, resumed anywhere, with and without
a worker."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from drumline.base.errors import CheckpointError, DataError, UsageError
from drumline.data.delivery import LoadingOptions, pin
from drumline.data.sharding import Cursor, Sharding
from drumline.data.stream_loader import StreamLoader
from drumline.data.stream_readers import (
    RankStreamReader,
    SharedStreamReader,
    StreamPosition,
    StreamStep,
)
from drumline.training.manager import DDPManager

CPU = torch.device("cpu")
# Python 3.12 warns about every fork of a process with threads; torch's worker processes are forked.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Numbers(IterableDataset[torch.Tensor]):
    """Samples that are their own number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.length))


class Noisy:
    """An iterable as users write them: shuffled and augmented by the global generators."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(23))
        random.shuffle(order)
        for number in order:
            noise = [torch.rand(()), random.random(), np.random.rand()]
            yield torch.tensor([self.epoch, number, *noise], dtype=torch.float64)


class Counting:
    """A stream that keeps its own place, in numbers and in a tensor; what it yields says whose it
    is."""

    def __init__(self, length: int = 7, offset: int = 0) -> None:
        self.length = length
        self.offset = offset
        self.epoch = 0
        self.state = {"next": 0, "seen": torch.zeros(2)}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return self.state  # the very dict that it goes on to change, as many do

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.state["next"] < self.length:
            self.state["next"] += 1
            self.state["seen"] += 1
            yield torch.tensor(
                [self.offset, self.epoch, self.state["next"] - 1, torch.rand(())],
                dtype=torch.float64,
            )
        self.state["next"] = 0


def make(
    dataset: Any, *, batch_size: int = 6, rank: int = 0, world_size: int = 1, **options: Any
) -> StreamLoader:
    cut = {
        name: options.pop(name)
        for name in ("accumulate", "micro_batch_size", "shards")
        if name in options
    }
    sharding = Sharding(batch_size=batch_size, rank=rank, world_size=world_size, **cut)
    return StreamLoader(
        dataset, sharding=sharding, device=CPU, seed=4, options=LoadingOptions(**options)
    )


def epochs(loader: StreamLoader, count: int) -> list[torch.Tensor]:
    return [batch for _ in range(count) for batch in loader]


def assert_same(expected: list[torch.Tensor], batches: list[torch.Tensor]) -> None:
    assert len(expected) == len(batches)
    assert all(torch.equal(a, b) for a, b in zip(expected, batches, strict=True))


@pytest.mark.slow
@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_an_epoch_holds_every_sample_exactly_once(
    length: int, batch_size: int, world_size: int, pieces: int, by_size: bool, data: st.DataObject
) -> None:
    shards = data.draw(st.none() | st.integers(world_size, 6))
    batch_size = max(batch_size, shards or world_size)
    cut: dict[str, Any] = {
        "micro_batch_size" if by_size else "accumulate": pieces,
        "shards": shards,
    }
    per_rank: list[list[list[int]]] = []
    num_pieces: list[list[int]] = []
    followings = []
    for rank in range(world_size):
        loader = make(
            Numbers(length), batch_size=batch_size, rank=rank, world_size=world_size, **cut
        )
        steps = []
        counts = []
        for step in loader.steps():
            micro_batches = list(step.micro_batches)
            assert [micro.is_last for micro in micro_batches] == [
                number == len(micro_batches) - 1 for number in range(len(micro_batches))
            ]
            counted = [
                number for micro in micro_batches if micro.size for number in micro.data.tolist()
            ]
            assert (
                len(counted) == step.plan.local_size == sum(micro.size for micro in micro_batches)
            )
            for micro in micro_batches:
                numbers = [number - step.plan.start for number in micro.data.tolist()]
                if micro.size:
                    assert {number % step.plan.num_shards for number in numbers} == {micro.shard}
                else:
                    assert numbers == list(range(len(numbers))), (
                        "a placeholder is the first samples"
                    )
            steps.append(counted)
            counts.append(len(micro_batches))
            followings.append((rank, step.plan.next_cursor))
        per_rank.append(steps)
        num_pieces.append(counts)
        assert loader.cursor == Cursor(1, 0)
    expected = [
        list(range(low, min(low + batch_size, length))) for low in range(0, length, batch_size)
    ]
    assert [sorted(itertools.chain(*shares)) for shares in zip(*per_rank, strict=True)] == expected
    if shards is None:
        assert all(counts == num_pieces[0] for counts in num_pieces), "collectives match"
    assert {following for _, following in followings} == {
        following for rank, following in followings if not rank
    }


@given(st.integers(1, 40), st.integers(3, 12), st.integers(1, 3), st.data())
def test_shards_hold_the_same_on_any_world(
    length: int, batch_size: int, world_size: int, data: st.DataObject
) -> None:
    def by_shard(world: int) -> dict[tuple[int, int], list[list[int]]]:
        batches: dict[tuple[int, int], list[list[int]]] = {}
        for rank in range(world):
            loader = make(
                Numbers(length),
                batch_size=batch_size,
                rank=rank,
                world_size=world,
                shards=3,
                accumulate=pieces,
            )
            for step in loader.steps():
                for micro in step.micro_batches:
                    batches.setdefault((step.plan.start, micro.shard), []).append(
                        micro.data.tolist()
                    )
        return batches

    pieces = data.draw(st.integers(1, 3))
    assert by_shard(world_size) == by_shard(1)


@pytest.mark.slow
@given(st.integers(1, 30), st.integers(1, 8), st.data())
def test_a_resume_at_any_cursor_continues_the_sequence(
    length: int, batch_size: int, data: st.DataObject
) -> None:
    loader = make(Numbers(length), batch_size=batch_size)
    expected = []
    cursors = []
    for _ in range(2):
        for step in loader.steps():
            cursors.append(Cursor(step.plan.epoch, step.plan.start))
            expected += [micro.data for micro in step.micro_batches]
    stop = data.draw(st.integers(0, len(cursors) - 1))
    resumed = make(Numbers(length), batch_size=batch_size)
    resumed.cursor = cursors[stop]
    assert_same(expected[stop:], epochs(resumed, 2 - cursors[stop].epoch))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_changes_nothing_and_randomness_belongs_to_the_position(workers: int) -> None:
    expected = epochs(make(Noisy(), accumulate=2), 3)
    # set_epoch was called
    assert [int(batch[0, 0]) for batch in expected[::8]] == [0, 1, 2]
    assert not torch.equal(expected[0][:, 1:], expected[8][:, 1:])
    with closing(make(Noisy(), accumulate=2, workers=workers)) as loader:
        assert_same(expected, epochs(loader, 3))
    with closing(make(Noisy(), accumulate=2, workers=workers)) as loader:
        next(iter(loader))
        loader.cursor = Cursor(1, 12)
        assert_same(expected[12:], epochs(loader, 2))
        assert loader.cursor == Cursor(3, 0)


def test_randomness_is_the_same_on_any_world() -> None:
    alone = sorted(row for batch in make(Noisy()) for row in batch.tolist())
    loaders = [make(Noisy(), rank=rank, world_size=3) for rank in range(3)]
    rows = [row for loader in loaders for batch in loader if loader.scale for row in batch.tolist()]
    assert sorted(rows) == alone


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Noisy, Counting])
def test_reading_leaves_the_randomness_of_the_training_process_alone(
    kind: type, workers: int
) -> None:
    def state() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = state()
    with closing(make(kind(), workers=workers)) as loader:
        list(itertools.islice(loader, 3))
        assert state() == before


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Noisy, Counting])
def test_a_step_that_is_given_up_half_way_is_handed_out_again_as_it_was(
    kind: type, workers: int
) -> None:
    expected = list(itertools.islice(make(kind(), accumulate=2), 6))
    with closing(make(kind(), accumulate=2, workers=workers)) as loader:
        first, second, given_up = (batch for batch in itertools.islice(loader, 3))
        given_up.zero_()  # as a loss that works in place
        batches = [first, second, *itertools.islice(loader, 4)]
        assert_same(expected, batches)


def test_the_length_is_not_known() -> None:
    loader = make(Numbers(7))
    assert loader.num_samples is loader.steps_per_epoch is None
    with pytest.raises(UsageError, match="the length of the stream Numbers is not known") as caught:
        len(loader)
    assert "count the batches" in str(caught.value)
    assert len(list(loader)) == 2  # `list` asks for the length first


def test_the_scale_makes_means_over_uneven_shares_exact() -> None:
    loaders = [make(Numbers(11), batch_size=4, rank=rank, world_size=3) for rank in range(3)]
    means = []
    for batches in zip(*loaders, strict=True):
        local = [
            loader.scale * batch.double().mean()
            for loader, batch in zip(loaders, batches, strict=True)
        ]
        means.append(float(sum(local)) / 3)
    assert means == pytest.approx([1.5, 5.5, 9.0])


def test_a_rank_that_a_short_batch_has_nothing_for_gets_a_placeholder_or_with_shards_nothing() -> (
    None
):
    placeholder = make(Numbers(7), rank=2, world_size=3)
    assert [(batch.tolist(), placeholder.scale) for batch in placeholder] == [
        ([2, 5], 1.0),
        ([6], 0.0),
    ]
    sharded = make(Numbers(9), rank=1, world_size=2, shards=3)
    assert [[m.data.tolist() for m in step.micro_batches] for step in sharded.steps()] == [
        [[2, 5]],
        [],
    ]
    assert sharded.cursor == Cursor(1, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_stream_is_refused(workers: int) -> None:
    with closing(make(Numbers(0), workers=workers)) as loader:
        with pytest.raises(DataError, match="the stream Numbers is empty in epoch 0") as caught:
            next(loader.steps())
        assert "starts from the beginning each time" in str(caught.value)


@pytest.mark.parametrize("position", [7, 9])
def test_a_stream_that_has_become_shorter_is_refused(position: int) -> None:
    loader = make(Numbers(7))
    loader.cursor = Cursor(2, position)
    text = f"is at sample {position} of epoch 2, but the stream Numbers ended after 7 samples"
    with pytest.raises(DataError, match=text) as caught:
        next(loader.steps())
    assert "resume with the dataset that the run began with" in str(caught.value)


def test_what_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(UsageError, match="the generator can be read only once") as caught:
        make(number for number in range(9))
    assert "whose __iter__ starts over each time" in str(caught.value)


def test_a_loader_is_no_dataset() -> None:
    with pytest.raises(
        UsageError, match="DataLoader makes batches, but a stream of samples is needed"
    ) as caught:
        make(DataLoader(Numbers(7)))
    assert "give the dataset that it reads" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_stream_names_the_sample(workers: int) -> None:
    class Torn(Numbers):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.arange(4)
            raise KeyError("shard-5.tar")

    with (
        closing(make(Torn(9), batch_size=2, workers=workers)) as loader,
        pytest.raises(KeyError, match=r"shard-5.tar") as caught,
    ):
        list(loader)
    assert "while reading sample 4 of Torn" in str(caught.value) + "".join(
        getattr(caught.value, "__notes__", [])
    )


def test_more_workers_than_one_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with closing(make(Numbers(7), workers=3)), closing(make(Numbers(7), workers=1)):
        (record,) = caplog.records
    assert record.message.startswith("a stream is read by 1 worker, not 3: several would split it")


def test_a_step_must_be_taken_whole() -> None:
    steps = make(Numbers(23)).steps()
    next(steps)
    with pytest.raises(UsageError, match="before all micro-batches of the last one were taken"):
        next(steps)


def test_sizes_are_checked_as_for_any_dataset() -> None:
    with pytest.raises(UsageError, match="a global batch of 2 cannot be split over 4 ranks"):
        make(Numbers(10), batch_size=2, world_size=4)


def test_an_answer_survives_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    # pinning itself needs a GPU
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    sharding = Sharding(batch_size=6, rank=0, world_size=1)
    for reader, opening in (
        (SharedStreamReader(Noisy(), sharding=sharding, seed=4), Cursor()),
        (RankStreamReader(Counting(), sharding=sharding, seed=4), StreamPosition()),
    ):
        answer = reader[opening]
        assert isinstance(answer, StreamStep)
        pinned = pin(answer)
        assert (type(pinned), pinned.plan) == (StreamStep, answer.plan)
        assert type(pinned.state) is type(answer.state)
        assert_same(answer.batches, pinned.batches)


def test_a_loop_of_the_users_own_gets_it_from_the_manager() -> None:
    with DDPManager() as ddp:
        loader = ddp.loader(Numbers(7), batch_size=4)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6]]
        assert [batch.tolist() for batch in ddp.loader(Numbers(3), batch_size=2, train=False)] == [
            [0, 1],
            [2],
        ]


# Streams that keep their own place


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumable_stream_starts_over_and_every_step_is_full(workers: int) -> None:
    with closing(make(Counting(), rank=1, world_size=3, batch_size=7, workers=workers)) as loader:
        batches = list(itertools.islice(loader, 8))
    # of 7 samples on three ranks: 3, 2, 2
    assert {len(batch) for batch in batches} == {2}
    rows = torch.cat(batches)
    # set_epoch was called
    assert rows[:, 1].tolist() == [0.0] * 7 + [1.0] * 7 + [2.0] * 2
    assert rows[:, 2].tolist() == [*range(7), *range(7), 0, 1]
    assert loader.cursor == Cursor(0, 56)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("taken", range(6))
def test_a_resumable_stream_continues_after_the_last_step_that_was_taken(
    workers: int, taken: int
) -> None:
    expected = list(itertools.islice(make(Counting(), batch_size=4, accumulate=2), 24))
    with closing(make(Counting(), batch_size=4, accumulate=2, workers=workers)) as loader:
        list(itertools.islice(loader, taken * 2))
        state = loader.stream_state()
    assert state is not None
    with closing(make(Counting(), batch_size=4, accumulate=2, workers=workers)) as resumed:
        resumed.load_stream_state(state)
        resumed.cursor = Cursor(0, 4 * taken)  # as the engine does; it is there already
        assert_same(expected[taken * 2 :], list(itertools.islice(resumed, 24 - taken * 2)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_closed_loader_continues_where_it_was(workers: int) -> None:
    expected = list(itertools.islice(make(Counting(), batch_size=4, accumulate=2), 8))
    batches: list[torch.Tensor] = []
    with closing(make(Counting(), batch_size=4, accumulate=2, workers=workers)) as loader:
        next(iter(loader))
        for _ in range(2):
            loader.close()
            batches += itertools.islice(loader, 4)
    assert_same(expected, batches)


def test_an_iterable_has_no_state_of_its_own() -> None:
    loader = make(Numbers(7))
    assert loader.stream_state() is None
    loader.load_stream_state({"anything": 1})
    assert loader.cursor == Cursor(0, 0)


def test_the_state_of_another_world_is_refused() -> None:
    state = make(Counting(), world_size=2).stream_state()
    with pytest.raises(
        CheckpointError,
        match="the state of the stream Counting was saved on 2 ranks, now there are 3",
    ) as caught:
        make(Counting(), world_size=3).load_stream_state(state)
    assert "resume on 2 ranks, or begin a new run with a map-style dataset" in str(caught.value)


def test_a_resumable_stream_cannot_go_anywhere_without_its_state() -> None:
    with pytest.raises(
        CheckpointError, match="is at sample 12, but holds no state of the stream Coun"
    ):
        make(Counting()).cursor = Cursor(0, 12)


def test_a_resumable_stream_cannot_be_cut_into_shards() -> None:
    with pytest.raises(
        UsageError, match="the stream Counting decides by rank what it yields"
    ) as caught:
        make(Counting(), shards=2)
    assert "train without --train.exact elastic" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumable_stream_that_is_empty_is_refused(workers: int) -> None:
    with closing(make(Counting(0), rank=1, world_size=2, workers=workers)) as loader:
        with pytest.raises(
            DataError, match="the stream Counting is empty in round 0 on rank 1"
        ) as caught:
            next(loader.steps())
        assert "starts over after its end" in str(caught.value)
