"""When a step of a shape is taken, watched and captured."""

from __future__ import annotations

from drumline.engine.steps.shapes_seen import STEPS_BEFORE, STEPS_OF_A_SHAPE, ShapesSeen


def test_a_shape_is_taken_then_watched_once_then_captured() -> None:
    seen = ShapesSeen()
    stages = [seen.next_stage("full") for _ in range(STEPS_BEFORE + 2)]
    assert stages == ["take"] * (STEPS_BEFORE - 1) + ["watch", "capture", "capture"]
    later = [seen.next_stage("short") for _ in range(STEPS_OF_A_SHAPE + 1)]
    assert later == ["take"] * (STEPS_OF_A_SHAPE - 1) + ["watch", "capture"]


def test_no_shape_is_captured_that_was_not_watched() -> None:
    """As where the short batch at the end of an epoch is the step at which the usual one would be watched."""
    seen = ShapesSeen()
    for _ in range(STEPS_BEFORE - 1):
        assert seen.next_stage("full") == "take"
    assert seen.next_stage("short") == "take"
    assert [seen.next_stage("full") for _ in range(2)] == ["watch", "capture"]


def test_it_knows_which_shapes_have_come() -> None:
    seen = ShapesSeen()
    seen.next_stage("full")
    assert "full" in seen
    assert "short" not in seen
    assert len(seen) == 1
