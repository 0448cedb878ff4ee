"""When a step of a shape is run, observed and captured."""

from __future__ import annotations

from drumline.engine.steps.graph import STEPS_BEFORE, STEPS_OF_A_SHAPE, ShapesSeen


def test_a_shape_runs_then_is_observed_once_and_then_captured() -> None:
    seen = ShapesSeen()
    stages = [seen.next_stage("full") for _ in range(STEPS_BEFORE + 2)]
    assert stages == ["run"] * (STEPS_BEFORE - 1) + ["observe", "capture", "capture"]
    later = [seen.next_stage("short") for _ in range(STEPS_OF_A_SHAPE + 1)]
    assert later == ["run"] * (STEPS_OF_A_SHAPE - 1) + ["observe", "capture"]


def test_no_shape_is_captured_that_was_not_observed() -> None:
    """As where the short batch at the end of an epoch is the step at which the usual one would be watched."""
    seen = ShapesSeen()
    for _ in range(STEPS_BEFORE - 1):
        assert seen.next_stage("full") == "run"
    assert seen.next_stage("short") == "run"
    assert [seen.next_stage("full") for _ in range(2)] == ["observe", "capture"]


def test_it_knows_which_shapes_have_come() -> None:
    seen = ShapesSeen()
    seen.next_stage("full")
    assert "full" in seen
    assert "short" not in seen
    assert len(seen) == 1
