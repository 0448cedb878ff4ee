"""A slice of the soak: random schedules of kills and resumes end with the bits of an uninterrupted
run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import PHASES
from tests.jobs import Everything
from tests.schedules import CUTS, References, make_schedule, run_schedule
from tests.stream_jobs import EverythingStream

# Every phase of a run has its turn, three of them in each schedule. These have few ranks, and one
# has workers, which take seconds to start in every rank of every leg; the soak has hundreds.
SLICE = [28152, 343, 3684, 91]
LEGS = 4


@pytest.mark.parametrize(
    "number", [SLICE[0], *(pytest.param(number, marks=pytest.mark.soak) for number in SLICE[1:])]
)
def test_killed_and_resumed_it_trains_the_same_bits(tmp_path: Path, number: int) -> None:
    schedule = make_schedule(number, legs=LEGS)
    assert run_schedule(schedule, tmp_path / "run") == References(tmp_path).digest_for(schedule), (
        schedule
    )


def test_the_slice_has_some_of_everything() -> None:
    schedules = [make_schedule(number, legs=LEGS) for number in SLICE]
    assert [fault.phase for one in schedules for fault in one.faults] == list(PHASES)
    assert [one.setup.exact for one in schedules] == ["elastic", "world"] * 2
    assert {world for one in schedules for world in one.worlds} == {1, 2, 3, 4}
    assert {one.workers for one in schedules} == {0, 2}
    assert {one.setup.task for one in schedules} == {Everything, EverythingStream}
    assert len({one.setup.cut for one in schedules}) == len(schedules)


def test_schedules_cover_what_can_happen() -> None:
    schedules = [make_schedule(number) for number in range(300)]
    assert {fault.phase for one in schedules for fault in one.faults} == set(PHASES)
    assert {one.workers for one in schedules} == {0, 2}
    for exact in ("elastic", "world"):
        of_kind = [one for one in schedules if one.setup.exact == exact]
        assert {world for one in of_kind for world in one.worlds} == {1, 2, 3, 4}
        assert {one.setup.cut for one in of_kind} == set(range(len(CUTS)))
        assert {one.setup.task for one in of_kind} == {Everything, EverythingStream}
    assert all(len(set(one.worlds)) == 1 for one in schedules if one.setup.exact == "world")
