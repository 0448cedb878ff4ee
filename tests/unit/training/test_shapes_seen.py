"""When a step of a shape is run, observed and captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drumline.data.loader import MicroBatch, Step
from drumline.training.steps.graph import (
    STEPS_BEFORE,
    STEPS_OF_A_SHAPE,
    GraphStep,
    Shape,
    ShapesSeen,
)


def test_a_shape_runs_then_is_observed_once_and_then_captured() -> None:
    shapes = ShapesSeen()
    stages = [shapes.next_stage("full") for _ in range(STEPS_BEFORE + 2)]
    assert stages == ["run"] * (STEPS_BEFORE - 1) + ["observe", "capture", "capture"]
    later = [shapes.next_stage("short") for _ in range(STEPS_OF_A_SHAPE + 1)]
    assert later == ["run"] * (STEPS_OF_A_SHAPE - 1) + ["observe", "capture"]


def test_no_shape_is_captured_that_was_not_observed() -> None:
    """As where the short batch at the end of an epoch is the step at which the usual one would be
    watched."""
    shapes = ShapesSeen()
    for _ in range(STEPS_BEFORE - 1):
        assert shapes.next_stage("full") == "run"
    assert shapes.next_stage("short") == "run"
    assert [shapes.next_stage("full") for _ in range(2)] == ["observe", "capture"]


def test_it_knows_which_shapes_have_come() -> None:
    shapes = ShapesSeen()
    shapes.next_stage("full")
    assert "full" in shapes
    assert "short" not in shapes
    assert len(shapes) == 1


def test_a_module_hook_that_was_registered_after_the_start_is_not_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in `Hook.start`, which comes after the step is made."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model = nn.Linear(1, 1)
    taken: list[Any] = []
    parts = {
        "heartbeat": None,
        "applied": model,
        "model": model,
        "optimizer": SGD(model.parameters(), lr=0.1),
    }
    job: Any = SimpleNamespace(
        ddp=SimpleNamespace(device=torch.device("cpu")), meter=None, group_settings=[{}], **parts
    )

    def inner(step: Step) -> None:
        taken.append([*step.micro_batches])

    graph_step = GraphStep(inner, job)
    model.register_forward_hook(lambda *_: None)
    micro_batches = [MicroBatch(torch.zeros(1, 1), 1, True, 0, True)]
    plan: Any = SimpleNamespace(global_size=1)
    step = Step(plan, iter(micro_batches))
    assert graph_step._capture(Shape(step, micro_batches), step, micro_batches) is None
    assert taken == [micro_batches]
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "because Linear has a hook, which a replayed step would not call"
    )
