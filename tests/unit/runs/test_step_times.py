"""The median, the percentile and the stalls of the steps of a run."""

from __future__ import annotations

import math

import pytest

from drumline.runs.step_times import BIN_RATIO, FIRST_STEPS, LongStep, StepTimesHistogram


def near(seconds: float) -> object:
    return pytest.approx(seconds, rel=BIN_RATIO - 1)


def test_a_stall_in_every_fiftieth_step_is_seen() -> None:
    histogram = StepTimesHistogram(rank=3)
    for step in range(1000):
        histogram.add(step, 0.4 if step % 50 == 49 else 0.1)
    times = histogram.times()
    assert times is not None
    assert times.rank == 3
    assert times.count == 1000 - FIRST_STEPS
    assert times.median_s == near(0.1)
    assert times.p99_s == near(0.4)
    assert times.stalls == 20
    assert times.stalled_part == pytest.approx(20 * 0.3 / (978 * 0.1 + 20 * 0.4), rel=0.05)
    assert times.longest[0] == LongStep(step=999, seconds=0.4)


def test_even_steps_have_no_stall() -> None:
    histogram = StepTimesHistogram(rank=0)
    for step in range(100):
        histogram.add(step, 0.1 + 0.0005 * (step % 10))
    times = histogram.times()
    assert times is not None
    assert times.stalls == 0
    assert times.stalled_part == 0


def test_the_first_steps_and_times_that_cannot_be_are_left_out() -> None:
    histogram = StepTimesHistogram(rank=0)
    histogram.add(FIRST_STEPS - 1, 9.0)
    for seconds in (0.0, -1.0, math.inf, math.nan):
        histogram.add(FIRST_STEPS, seconds)
    assert histogram.times() is None
