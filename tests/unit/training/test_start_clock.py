"""The clock from the command to the first step."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.base.rank_environment import COMMAND_START
from drumline.base.startup import now, process_start
from drumline.runs.events import Reporter
from drumline.training.output import StartClock, start_clock


def told(clock: StartClock) -> dict[str, Any]:
    events: list[Any] = []
    clock.report(Reporter([events.append], rank=0, host="here"), step=1)
    return dict(events[0])


def test_its_parts_are_all_of_the_time() -> None:
    clock = StartClock(now() - 5.0)
    clock.mark("data")
    clock.mark("model")
    clock.mark("data")
    event = told(clock)
    assert (event["kind"], event["step"], event["since"]) == ("first_step", 1, "rank")
    assert list(event["parts"]) == ["data", "model", "first step"]
    assert event["parts"]["data"] >= 5.0 > event["parts"]["model"] >= 0.0
    assert event["seconds"] == pytest.approx(sum(event["parts"].values()))
    assert event["seconds"] <= now() - clock.began


def test_alone_the_command_is_this_process() -> None:
    # that was of another command
    clock = start_clock({COMMAND_START: "1.0"}, is_alone=True)
    assert (clock.began, clock.since) == (process_start(), "command")
    assert list(clock.parts) == ["python and torch"]


def test_a_rank_counts_from_its_launcher() -> None:
    began = process_start() - 0.5
    clock = start_clock({COMMAND_START: str(began)}, is_alone=False)
    assert (clock.began, clock.since) == (began, "command")
    assert clock.parts["launcher"] == pytest.approx(0.5)
    assert list(clock.parts) == ["launcher", "python and torch"]


@pytest.mark.parametrize("environment", [{}, {COMMAND_START: ""}])
def test_a_rank_that_was_not_told_counts_from_its_own_start(environment: dict[str, str]) -> None:
    clock = start_clock(environment, is_alone=False)
    assert (clock.began, clock.since) == (process_start(), "rank")
    assert list(clock.parts) == ["python and torch"]
