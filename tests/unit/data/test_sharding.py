"""Who sees what: each sample exactly once, the same global batches for every world size."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from drumline.data.sharding import Cursor, Sharding, StepPlan, plan_epoch, plan_step

LENGTHS = st.integers(0, 200)
SIZES = st.integers(1, 40)
WORLDS = st.integers(1, 9)
PIECES = st.integers(1, 6)


def epoch_of(rank: int, *, length: int, **settings: Any) -> list[StepPlan]:
    return list(plan_epoch(Cursor(2, 0), length=length, sharding=Sharding(rank=rank, **settings)))


def counted(plan: StepPlan) -> list[int]:
    """The positions this rank's step counts, in order, placeholders left out."""
    return [
        position for span in plan.spans if span.counts for position in range(span.low, span.high)
    ]


def bounds(plan: StepPlan) -> list[tuple[int, int]]:
    return [(span.low, span.high) for span in plan.spans]


def sizes(plan: StepPlan) -> list[int]:
    return [span.size for span in plan.spans]


@given(LENGTHS, SIZES, WORLDS, PIECES)
def test_every_sample_is_seen_exactly_once(
    length: int, batch_size: int, world_size: int, accumulate: int
) -> None:
    positions = [
        position
        for rank in range(world_size)
        for plan in epoch_of(
            rank, length=length, batch_size=batch_size, world_size=world_size, accumulate=accumulate
        )
        for position in counted(plan)
    ]
    assert sorted(positions) == list(range(length))


@given(LENGTHS, SIZES, WORLDS, PIECES)
def test_all_ranks_take_the_same_steps_and_as_many_micro_batches(
    length: int, batch_size: int, world_size: int, accumulate: int
) -> None:
    alone = epoch_of(0, length=length, batch_size=batch_size, world_size=1)
    ranks = [
        epoch_of(
            rank, length=length, batch_size=batch_size, world_size=world_size, accumulate=accumulate
        )
        for rank in range(world_size)
    ]
    for plans in ranks:
        assert [(plan.start, plan.stop, plan.next_cursor) for plan in plans] == [
            (plan.start, plan.stop, plan.next_cursor) for plan in alone
        ]
    for step in zip(*ranks, strict=True):
        assert len({len(plan.spans) for plan in step}) == 1
        assert [position for plan in step for position in counted(plan)] == list(
            range(step[0].start, step[0].stop)
        )


@given(LENGTHS, SIZES, WORLDS, PIECES)
def test_shares_are_balanced_and_add_up(
    length: int, batch_size: int, world_size: int, accumulate: int
) -> None:
    ranks = [
        epoch_of(
            rank, length=length, batch_size=batch_size, world_size=world_size, accumulate=accumulate
        )
        for rank in range(world_size)
    ]
    for step in zip(*ranks, strict=True):
        shares = [plan.local_size for plan in step]
        assert sum(shares) == step[0].global_size
        assert shares == sorted(shares, reverse=True)
        taken = [share for share in shares if share]
        assert taken[0] - taken[-1] <= 1
        for plan in step:
            assert plan.spans
            assert all(plan.start <= low < high <= plan.stop for low, high in bounds(plan))
            assert sum(sizes(plan)) == plan.local_size
            assert sizes(plan).count(0) <= 1
            assert counted(plan) == list(range(*plan.local_range))
        assert 0 not in sizes(step[0])


@given(LENGTHS, SIZES, WORLDS, PIECES)
def test_no_rank_is_left_with_one_sample(
    length: int, batch_size: int, world_size: int, accumulate: int
) -> None:
    """BatchNorm cannot work with one; nor with a placeholder of one."""
    if batch_size // (world_size * accumulate) < 2:
        return
    for rank in range(world_size):
        for plan in epoch_of(
            rank, length=length, batch_size=batch_size, world_size=world_size, accumulate=accumulate
        ):
            assert all(high - low >= 2 or plan.global_size == 1 for low, high in bounds(plan))


@given(LENGTHS, SIZES, WORLDS, PIECES, st.data())
def test_a_resume_from_any_cursor_on_any_world_continues_the_same_sequence(
    length: int, batch_size: int, world_size: int, accumulate: int, data: st.DataObject
) -> None:
    whole = epoch_of(0, length=length, batch_size=batch_size, world_size=1)
    if not whole:
        return
    done = data.draw(st.integers(0, len(whole) - 1))
    cursor = Cursor(2, whole[done].start)
    sharding = Sharding(rank=0, batch_size=batch_size, world_size=world_size, accumulate=accumulate)
    rest = plan_epoch(cursor, length=length, sharding=sharding)
    assert [(plan.start, plan.stop) for plan in rest] == [
        (plan.start, plan.stop) for plan in whole[done:]
    ]


def test_a_step_in_the_middle() -> None:
    sharding = Sharding(batch_size=10, rank=1, world_size=3, accumulate=2)
    plan = plan_step(Cursor(1, 20), length=100, sharding=sharding)
    assert (plan.epoch, plan.start, plan.stop) == (1, 20, 30)
    assert bounds(plan) == [(24, 26), (26, 27)]  # shares of 4, 3 and 3
    assert (plan.local_range, plan.local_size, plan.global_size) == ((24, 27), 3, 10)
    assert plan.next_cursor == Cursor(1, 30)


def test_the_last_step_may_be_empty_on_some_ranks() -> None:
    sharding = Sharding(batch_size=10, rank=2, world_size=3, accumulate=2)
    plan = plan_step(Cursor(0, 98), length=100, sharding=sharding)
    assert bounds(plan) == [(98, 99)]
    assert not plan.spans[0].counts
    assert (plan.local_size, plan.global_size) == (0, 2)
    assert plan.next_cursor == Cursor(1, 0)


def test_a_rank_with_too_few_samples_for_its_micro_batches_ends_with_a_placeholder() -> None:
    """Five samples on two ranks, three micro-batches: the second rank has two samples, and one
    placeholder."""
    sharding = Sharding(batch_size=8, rank=1, world_size=2, accumulate=3)
    plan = plan_step(Cursor(0, 10), length=15, sharding=sharding)
    assert bounds(plan) == [(13, 14), (14, 15), (10, 11)]
    assert sizes(plan) == [1, 1, 0]


@given(LENGTHS, SIZES, WORLDS, PIECES)
def test_a_micro_batch_is_never_larger_than_asked(
    length: int, batch_size: int, world_size: int, most: int
) -> None:
    ranks = [
        epoch_of(
            rank, length=length, batch_size=batch_size, world_size=world_size, micro_batch_size=most
        )
        for rank in range(world_size)
    ]
    for step in zip(*ranks, strict=True):
        assert len({len(plan.spans) for plan in step}) == 1
        assert all(size <= most for plan in step for size in sizes(plan))
        assert [position for plan in step for position in counted(plan)] == list(
            range(step[0].start, step[0].stop)
        )


@given(LENGTHS, SIZES, st.integers(1, 9), WORLDS, PIECES, st.booleans())
def test_shards_are_the_same_on_any_number_of_ranks(
    length: int, batch_size: int, shards: int, world_size: int, cut: int, by_size: bool
) -> None:
    settings = {
        "batch_size": batch_size,
        "shards": shards,
        ("micro_batch_size" if by_size else "accumulate"): cut,
    }
    alone = epoch_of(0, length=length, world_size=1, **settings)
    ranks = [
        epoch_of(rank, length=length, world_size=world_size, **settings)
        for rank in range(world_size)
    ]
    for plan_alone, *step in zip(alone, *ranks, strict=True):
        assert [span for plan in step for span in plan.spans] == list(plan_alone.spans)
        assert counted(plan_alone) == list(range(plan_alone.start, plan_alone.stop))
        assert {plan.num_shards for plan in step} == {plan_alone.num_shards}
        assert [span.shard for span in plan_alone.spans if span.ends_shard] == list(
            range(plan_alone.num_shards)
        )
        assert all(counted(plan) == list(range(*plan.local_range)) for plan in step)


@given(LENGTHS, st.lists(st.integers(1, 12), min_size=1, max_size=6), PIECES, st.booleans())
def test_shards_of_different_sizes_cover_every_sample_once(
    length: int, uneven: list[int], cut: int, by_size: bool
) -> None:
    """In as many micro-batches on every rank, and never more samples in one than asked for."""
    batch_size = sum(uneven)
    world_size = len(uneven)
    settings = {
        "batch_size": batch_size,
        "world_size": world_size,
        ("micro_batch_size" if by_size else "accumulate"): cut,
    }
    ranks = [
        epoch_of(rank, length=length, sizes=tuple(uneven), **settings) for rank in range(world_size)
    ]
    for step in zip(*ranks, strict=True):
        assert [position for plan in step for position in counted(plan)] == list(
            range(step[0].start, step[0].stop)
        )
        assert len({len(plan.spans) for plan in step}) == 1
        assert all(counted(plan) == list(range(*plan.local_range)) for plan in step)
        assert sizes(step[0])[0] > 0, "rank 0, whose buffers are broadcast, always has samples"
        assert not by_size or all(size <= cut for plan in step for size in sizes(plan))
        if step[0].global_size == batch_size and min(uneven) >= 2:
            assert [plan.local_size for plan in step] == uneven


def test_a_short_batch_is_split_in_the_same_proportion_unless_a_rank_would_get_too_few() -> None:
    def shards(length: int) -> list[int]:
        cut = {"batch_size": 32, "world_size": 3, "sizes": (16, 12, 4)}
        return [
            plan_step(Cursor(), length=length, sharding=Sharding(rank=rank, **cut)).local_size
            for rank in range(3)
        ]  # type: ignore[arg-type]

    assert shards(32) == [16, 12, 4]
    assert shards(24) == [12, 9, 3]
    assert shards(8) == [3, 3, 2]
