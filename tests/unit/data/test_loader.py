"""The training loader: exact shares, resume anywhere, the same batches with and without worker
processes."""

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

from drumline.base.errors import DataError, UsageError
from drumline.data.delivery import LoadingOptions
from drumline.data.loader import IndexedLoader
from drumline.data.sharding import Cursor, Draws, Sharding

CPU = torch.device("cpu")
pytestmark = [
    # Python 3.12 warns about every fork of a process with threads; torch's worker processes are
    # forked.
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    # torch warns about more workers than cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Indices:
    """Samples that are their own index, and what chance gives them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: np.ndarray, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert draws is not None
        return torch.from_numpy(indices), torch.from_numpy(draws.uniform(2))


class Noisy:
    """A map-style dataset with an augmentation as users write them."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(
            [index, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64
        )


class FailsAt(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise KeyError("no such image: cat-5.png")
        return super().__getitem__(index)


def make(
    dataset: Any, *, batch_size: int = 6, rank: int = 0, world_size: int = 1, **options: Any
) -> IndexedLoader:
    cut = {
        name: options.pop(name)
        for name in ("accumulate", "micro_batch_size", "shards")
        if name in options
    }
    sharding = Sharding(batch_size=batch_size, rank=rank, world_size=world_size, **cut)
    return IndexedLoader(
        dataset, sharding=sharding, device=CPU, seed=4, options=LoadingOptions(**options)
    )


def epochs(loader: IndexedLoader, count: int) -> list[torch.Tensor]:
    return [batch for _ in range(count) for batch in loader]


@pytest.mark.slow
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5), st.integers(1, 4))
def test_an_epoch_holds_every_sample_exactly_once(
    length: int, batch_size: int, world_size: int, pieces: int
) -> None:
    batch_size = max(batch_size, world_size)
    indices_read: list[int] = []
    batches_per_step: list[list[set[int]]] = []
    for rank in range(world_size):
        loader = make(
            Indices(length),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            accumulate=pieces,
        )
        steps = []
        num_batches = 0
        for step in loader.steps():
            micro_batches = list(step.micro_batches)
            num_batches += len(micro_batches)
            assert [micro.is_last for micro in micro_batches] == [False] * (
                len(micro_batches) - 1
            ) + [True]
            assert loader.cursor == step.plan.next_cursor
            counted = [
                index for micro in micro_batches if micro.size for index in micro.data[0].tolist()
            ]
            assert len(counted) == step.plan.local_size
            indices_read += counted
            steps.append(set(counted))
        assert len(loader) == num_batches
        batches_per_step.append(steps)
        assert loader.cursor == Cursor(1, 0)
    assert sorted(indices_read) == list(range(length))
    alone = [
        set(micro.data[0].tolist())
        for step in make(Indices(length), batch_size=batch_size).steps()
        for micro in step.micro_batches
    ]
    assert [set.union(*shares) for shares in zip(*batches_per_step, strict=True)] == alone


def test_each_epoch_has_an_order_of_its_own() -> None:
    loader = make(Indices(23))
    first = torch.cat([indices for indices, _ in loader])
    second = torch.cat([indices for indices, _ in loader])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(23))
    assert first.tolist() != second.tolist()
    assert loader.cursor == Cursor(2, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Indices(23), Noisy()], ids=["batches", "samples"])
def test_workers_change_nothing(dataset: Any, workers: int) -> None:
    with (
        closing(make(dataset, accumulate=2)) as alone,
        closing(make(dataset, accumulate=2, workers=workers)) as loader,
    ):
        for expected, batch in zip(epochs(alone, 3), epochs(loader, 3), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(expected, batch, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_resume_in_the_middle_of_an_epoch_continues_the_sequence(
    workers: int, persistent: bool
) -> None:
    expected = epochs(make(Noisy()), 3)
    assert len(expected) == 12
    with closing(make(Noisy(), workers=workers, persistent_workers=persistent)) as loader:
        next(iter(loader))
        loader.cursor = Cursor(1, 12)
        batches = epochs(loader, 2)
        assert loader.cursor == Cursor(3, 0)
    assert len(batches) == 6
    assert all(torch.equal(a, b) for a, b in zip(expected[6:], batches, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_loop_that_is_left_early_continues_where_it_was_left(
    workers: int, persistent: bool
) -> None:
    expected = epochs(make(Noisy()), 1)
    with closing(make(Noisy(), workers=workers, persistent_workers=persistent)) as loader:
        batches = list(itertools.islice(loader, 2)) + list(loader)
    assert len(batches) == 4
    assert all(torch.equal(a, b) for a, b in zip(expected, batches, strict=True))


def test_a_step_that_is_given_up_half_way_is_made_again() -> None:
    loader = make(Indices(23), accumulate=3)
    *_, given_up = itertools.islice(loader, 5)  # the second of the second step's three
    assert loader.cursor == Cursor(0, 6)
    _, again = itertools.islice(loader, 2)
    assert torch.equal(again[0], given_up[0])


def test_user_randomness_belongs_to_the_sample_on_any_world_and_any_number_of_workers() -> None:
    def noise(world_size: int, workers: int) -> Iterator[dict[int, list[float]]]:
        loaders = [
            make(Noisy(), rank=rank, world_size=world_size, workers=workers)
            for rank in range(world_size)
        ]
        for _ in range(2):
            rows = [row for loader in loaders for batch in loader for row in batch.tolist()]
            yield {int(index): values for index, *values in rows}
        for loader in loaders:
            loader.close()

    first, second = noise(1, 0)
    assert len(first) == len(second) == 23
    assert all(
        a != b for index in range(23) for a, b in zip(first[index], second[index], strict=True)
    )
    assert list(noise(3, 0)) == [first, second]
    assert list(noise(2, 1)) == [first, second]


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_randomness_of_the_training_process_alone(workers: int) -> None:
    def state() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = state()
    with closing(make(Noisy(), workers=workers)) as loader:
        assert len(list(loader)) == 4
        assert state() == before


def test_the_scale_makes_means_over_uneven_shares_exact() -> None:
    """Eleven samples on three ranks in global batches of 4: shares of 2-1-1, and of 1-1-1 in the
    end."""
    loaders = [make(Indices(11), batch_size=4, rank=rank, world_size=3) for rank in range(3)]
    scales = []
    means = []
    for batches in zip(*loaders, strict=True):
        scales.append([loader.scale for loader in loaders])
        local = [
            loader.scale * indices.double().mean()
            for loader, (indices, _) in zip(loaders, batches, strict=True)
        ]
        means.append(float(sum(local)) / 3)
    assert scales == [[1.5, 0.75, 0.75], [1.5, 0.75, 0.75], [1.0, 1.0, 1.0]]
    expected = [float(indices.double().mean()) for indices, _ in make(Indices(11), batch_size=4)]
    assert means == pytest.approx(expected)


def test_an_empty_share_is_a_placeholder_that_counts_nothing() -> None:
    loader = make(Indices(7), batch_size=6, rank=2, world_size=3)
    sizes_and_scales = [(len(indices), loader.scale) for indices, _ in loader]
    assert sizes_and_scales == [(2, 1.0), (1, 0.0)]


def test_a_short_share_ends_with_a_placeholder_micro_batch() -> None:
    """Five samples, two ranks, three micro-batches each."""
    loader = make(Indices(5), rank=1, world_size=2, accumulate=3)
    scales = [loader.scale for _ in loader]
    assert scales == [2 / 5, 2 / 5, 0.0]


def test_the_length_is_the_number_of_batches_of_an_epoch() -> None:
    loader = make(Indices(23), world_size=2, rank=1, accumulate=2)
    assert len(loader) == len(list(loader)) == 8
    assert loader.steps_per_epoch == 4
    assert loader.num_samples == 23


@pytest.mark.parametrize("persistent", [True, False])
def test_an_error_in_a_worker_carries_the_original_text(persistent: bool) -> None:
    with (
        closing(make(FailsAt(), workers=1, persistent_workers=persistent)) as loader,
        pytest.raises(
            KeyError, match=r"no such image: cat-5.png[\s\S]*while reading sample 5 of FailsAt"
        ),
    ):
        list(loader)


def test_a_batch_too_small_for_the_world_is_refused() -> None:
    with pytest.raises(
        UsageError, match="a global batch of 2 cannot be split over 4 ranks"
    ) as caught:
        make(Indices(10), batch_size=2, world_size=4)
    assert "set the batch size to 4 or more, or choose fewer ranks" in str(caught.value)


def test_a_batch_too_small_for_the_shards_is_refused() -> None:
    with pytest.raises(
        UsageError, match="a global batch of 2 cannot be split over 4 shards"
    ) as caught:
        make(Indices(10), batch_size=2, shards=4)
    assert "set the batch size to 4 or more, or choose fewer shards" in str(caught.value)


def test_more_ranks_than_shards_are_refused() -> None:
    with pytest.raises(
        UsageError, match="2 shards are too few for 4 ranks: some ranks would have no"
    ) as caught:
        make(Indices(10), world_size=4, shards=2)
    assert "start at most 2 ranks, or begin a new run with --train.shards 4" in str(caught.value)


@pytest.mark.parametrize("name", ["accumulate", "micro_batch_size"])
def test_a_step_of_no_micro_batches_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot be 0"):
        make(Indices(10), **{name: 0})


def test_a_rank_without_shards_of_a_short_batch_moves_on_with_the_others() -> None:
    loader = make(Indices(9), batch_size=6, rank=1, world_size=2, shards=3)
    shares = [[piece.data[0].tolist() for piece in step.micro_batches] for step in loader.steps()]
    # three samples are one shard: each has two or more
    assert [len(pieces) for pieces in shares] == [1, 0]
    assert loader.cursor == Cursor(1, 0)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="the dataset Indices is empty"):
        make(Indices(0))


@pytest.mark.parametrize("cursor", [Cursor(3, 23), Cursor(0, -1), Cursor(-1, 0)])
def test_a_cursor_outside_the_dataset_is_refused(cursor: Cursor) -> None:
    loader = make(Indices(23))
    with pytest.raises(
        DataError, match=f"is at sample {cursor.position} of epoch {cursor.epoch}, but .* has 23"
    ):
        loader.cursor = cursor


def test_a_step_must_be_taken_whole() -> None:
    steps = make(Indices(23)).steps()
    next(steps)
    with pytest.raises(UsageError, match="before all micro-batches of the last one were taken"):
        next(steps)


def test_a_loader_says_which_micro_batch_ends_a_step() -> None:
    loader = make(Indices(10), batch_size=6, accumulate=3)
    assert [loader.is_last_micro_batch for _ in loader] == [False, False, True, False, True]


def test_the_state_of_a_loader_is_where_its_next_step_starts() -> None:
    loader = make(Indices(20), batch_size=6, accumulate=2)
    # the second epoch, in the middle of its second step
    batches = [list(loader)[-1], *itertools.islice(loader, 3)]
    state = loader.state_dict()
    assert state == {"epoch": 1, "position": 6, "stream": None}
    resumed = make(Indices(20), batch_size=6, accumulate=2)
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    assert torch.equal(next(iter(resumed))[0], batches[-1][0])


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_change_their_sizes_between_steps_and_no_sample_is_lost(workers: int) -> None:
    """Workers have made batches of the old sizes by then."""
    batches: list[list[int]] = []
    for rank in range(2):
        with closing(
            make(Indices(40), batch_size=8, rank=rank, world_size=2, workers=workers)
        ) as loader:
            for number, step in enumerate(itertools.chain(loader.steps(), loader.steps())):
                (micro,) = step.micro_batches
                assert (
                    len(micro.data[0])
                    == step.plan.local_size
                    == ((4, 4) if number < 3 else (6, 2))[rank]
                )
                if rank == 0:
                    batches.append([])
                batches[number] += micro.data[0].tolist()
                if number == 2:
                    loader.resize_shards((6, 2))
    alone = [batch.tolist() for batch, _ in epochs(make(Indices(40), batch_size=8), 2)]
    assert batches == alone
