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


@pytest.mark.soak
@pytest.mark.parametrize("number", SLICE)
def test_killed_and_resumed_it_trains_the_same_bits(tmp_path: Path, number: int) -> None:
    schedule = make_schedule(number, legs=LEGS)
    assert run_schedule(schedule, tmp_path / "run") == References(tmp_path).digest_for(schedule), (
        schedule
    )


def test_the_slice_has_some_of_everything() -> None:
    schedules = [make_schedule(number, legs=LEGS) for number in SLICE]
    assert [fault.phase for schedule in schedules for fault in schedule.faults] == list(PHASES)
    assert [schedule.setup.exact for schedule in schedules] == ["elastic", "world"] * 2
    assert {world for schedule in schedules for world in schedule.worlds} == {1, 2, 3, 4}
    assert {schedule.workers for schedule in schedules} == {0, 2}
    assert {schedule.setup.task for schedule in schedules} == {Everything, EverythingStream}
    assert len({schedule.setup.cut for schedule in schedules}) == len(schedules)


def test_schedules_cover_what_can_happen() -> None:
    schedules = [make_schedule(number) for number in range(300)]
    assert {fault.phase for schedule in schedules for fault in schedule.faults} == set(PHASES)
    assert {schedule.workers for schedule in schedules} == {0, 2}
    for exact in ("elastic", "world"):
        of_kind = [schedule for schedule in schedules if schedule.setup.exact == exact]
        assert {world for schedule in of_kind for world in schedule.worlds} == {1, 2, 3, 4}
        assert {schedule.setup.cut for schedule in of_kind} == set(range(len(CUTS)))
        assert {schedule.setup.task for schedule in of_kind} == {Everything, EverythingStream}
    assert all(
        len(set(schedule.worlds)) == 1 for schedule in schedules if schedule.setup.exact == "world"
    )
