"""The ledger records in a few entries exactly what the steps covered."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.data.sharding import Cursor, Ledger, Sharding, StepPlan, plan_epoch, plan_step
from drumline.runs.ledger_entries import LedgerEntry, from_json, num_steps


def plans(
    count: int,
    *,
    length: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    shards: int | None = None,
) -> list[StepPlan]:
    sharding = Sharding(batch_size=batch_size, rank=rank, world_size=world_size, shards=shards)
    cursor = Cursor()
    made = []
    for _ in range(count):
        made.append(plan_step(cursor, length=length, sharding=sharding))
        cursor = made[-1].next_cursor
    return made


def covered(runs: list[LedgerEntry]) -> list[tuple[int, list[int]]]:
    """Step by step: the epoch, and the positions."""
    steps = [run.slice(number, 1) for run in runs for number in range(run.steps)]
    return [(step.epoch, list(range(step.low, step.high))) for step in steps]


@settings(deadline=None)
@given(st.data())
def test_runs_are_what_the_plans_were(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 5))
    length = data.draw(st.integers(1, 60))
    made = plans(
        data.draw(st.integers(0, 40)),
        length=length,
        batch_size=data.draw(st.integers(8, 20)),
        rank=data.draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        shards=data.draw(st.sampled_from([None, 6, 8])),
    )
    taken_at = data.draw(st.sets(st.integers(0, 40)))
    ledger = Ledger()
    runs = []
    for number, plan in enumerate(made):
        ledger.add(plan)
        if number in taken_at:
            runs += ledger.take()
    runs += ledger.take()
    assert covered(runs) == [(plan.epoch, list(range(*plan.local_range))) for plan in made]
    assert num_steps(runs) == len(made)
    assert from_json([list(run) for run in runs]) == runs
    assert ledger.take() == []


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize(("length", "runs_an_epoch"), [(6400, 1), (6401, 2), (6463, 2)])
def test_an_epoch_of_any_length_is_one_run_or_two(
    world_size: int, length: int, runs_an_epoch: int
) -> None:
    for rank in range(world_size):
        ledger = Ledger()
        sharding = Sharding(batch_size=64, rank=rank, world_size=world_size)
        for plan in plan_epoch(Cursor(), length=length, sharding=sharding):
            ledger.add(plan)
        assert len(ledger.take()) == runs_an_epoch


def test_a_last_batch_that_only_looks_like_the_others_is_a_run_of_its_own() -> None:
    """Rank 0 has two samples of 5 over 3 ranks, and of the last 4 as well; but the batch was
    another."""
    ledger = Ledger()
    for plan in plans(3, length=14, batch_size=5, world_size=3):
        ledger.add(plan)
    assert ledger.take() == [LedgerEntry(0, 0, 2, 5, 2), LedgerEntry(0, 10, 12, 4, 1)]


def test_regular_steps_take_no_memory() -> None:
    made = plans(10_010, length=10**7, batch_size=64, rank=1, world_size=2)
    ledger = Ledger()
    for plan in islice(made, 10):
        ledger.add(plan)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for plan in islice(made, 10, None):
        ledger.add(plan)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 1000
    assert ledger.take() == [LedgerEntry(0, 32, 64, 64, 10_010)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "it is not a list of entries"),
        ([7], "7 is not a ledger entry"),
        ([[0, 0, 4, 8]], "is not a ledger entry"),
        ([[0, 0, 4, 8, 1.5]], "more than whole numbers"),
        ([[0, 0, 4, 8, True]], "more than whole numbers"),
        ([[0, 5, 4, 8, 1]], "is out of range for a ledger entry"),
        ([[0, 0, 4, 8, 0]], "is out of range for a ledger entry"),
        ([[0, 0, 4, 0, 1]], "is out of range for a ledger entry"),
        ([[-1, 0, 4, 8, 1]], "is out of range for a ledger entry"),
        ([[0, 0, 4, 8, 1, 2, 2]], "is not a ledger entry"),
    ],
)
def test_what_no_ledger_has_written_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(value)
