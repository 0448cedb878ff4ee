"""A script that runs torch's profiler itself can be profiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from drumline.rank.profiled.slow_modes import PROFILER_CALLS, OtherProfilers


@pytest.fixture
def others() -> Iterator[OtherProfilers]:
    calls = {name: getattr(profiler, name) for name in PROFILER_CALLS}
    others = OtherProfilers()
    others.observe()
    yield others
    for name, call in calls.items():
        setattr(profiler, name, call)


def recorded() -> int:
    """How many operations the user's profiler has seen in a step."""
    with profile(activities=[ProfilerActivity.CPU]) as of_user:
        torch.ones(4).sum()
    return len(of_user.key_averages())


def test_profilers_of_the_user_are_seen_and_record_nothing_while_they_are_silent(
    others: OtherProfilers,
) -> None:
    with others.ours():
        recorded()
    assert others.line is None

    assert recorded()
    assert others.line is not None
    assert others.line.source == "with profile(activities=[ProfilerActivity.CPU]) as of_user:"

    others.silence()
    with others.ours():
        ours = profile(activities=[ProfilerActivity.CPU])
        ours.start()
    torch.ones(4).sum()
    assert recorded() == 0
    with others.ours():
        ours.stop()
    assert "aten::sum" in {event.key for event in ours.key_averages()}
    others.resume()
    assert recorded()


def test_a_profiler_of_the_user_that_records_ends_early(others: OtherProfilers) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as of_user:
        others.silence()
        torch.ones(4).sum()
        others.resume()
    assert len(of_user.key_averages()) == 0
    assert recorded()


def test_a_profiler_that_one_capture_ended_has_a_result_in_the_next_one(
    others: OtherProfilers, tmp_path: Path
) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as of_user:
        torch.ones(4).sum()
        others.silence()
        others.resume()
        next_others = OtherProfilers()
        next_others.observe()
    of_user.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "aten::sum" not in (tmp_path / "trace.json").read_text()
