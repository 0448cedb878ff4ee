"""Any torch optimizer, with rates and a schedule of the task's own, keeps what the built-in ones
promise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import NAdam, Optimizer, Rprop

from drumline.base.errors import OptimizerMismatchError, UsageError
from drumline.config.schema import OptimConfig
from drumline.runs.events import read_events
from drumline.training.tasks.base import Loss, Metric
from tests.jobs import (
    Classify,
    Everything,
    assert_same_bits,
    make_config,
    newest,
    train_each_on,
    train_here,
    train_on,
)
from tests.multiproc.test_elastic import elastic
from tests.multiproc.test_on_nan import Breaks
from tests.multiproc.test_resume import EVERY_STEP, interrupted_at
from tests.multiproc.test_task_metrics import MedianMargin


class Momentum(Optimizer):
    """As people write their own: one state tensor, plain text and a number beside it, a count of no
    parameter, and one in each group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "taken": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1  # type: ignore[index]
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                state["kind"], state["updates"] = "lerp", state.get("updates", 0) + 1
                mean.lerp_(parameter.grad, 0.1 + 1 / (state["updates"] + 1))
                fall = (group["taken"] * self.state["all"]["steps"]) ** 0.1  # type: ignore[index]
                parameter.sub_(mean * (group["lr"] / fall))


class OwnOptimizer(Everything):
    """Two groups with a rate each, a schedule, a metric that is no sum, and noise that is added on
    the device."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        assert first.device.type == "cpu"
        return NAdam(
            [{"params": [first], "lr": 0.05}, {"params": others}], lr=0.01, momentum_decay=0.1
        )

    def on_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        return (
            inputs + 0.1 * torch.randn_like(inputs) if self.training else inputs
        ).float(), targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        scores = model(batch[0])
        total = nn.functional.cross_entropy(scores, batch[1], reduction="sum")
        return Loss(
            total,
            metrics={"accuracy": (scores.argmax(1) == batch[1]).sum()},
            outputs=(scores, batch[1]),
        )

    def metrics(self) -> dict[str, Metric]:
        return {"margin": MedianMargin()}

    def schedule(self, step: int, total_steps: int) -> float | None:
        return None if step < 2 else 1 - step / total_steps


class OwnClass(OwnOptimizer):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return Momentum(
            [
                {"params": [one], "lr": 0.1 / (number + 1)}
                for number, one in enumerate(model.parameters())
            ],
            0.1,
        )


MUON = OptimConfig(name="muon", lr=0.02, weight_decay=0.01, clip_norm=1.0)


CASES = {"own": (OwnOptimizer, None), "class": (OwnClass, None), "muon": (Everything, MUON)}


@pytest.mark.soak
def test_killed_and_resumed_is_bit_identical(tmp_path: Path) -> None:
    jobs = []
    for name, (task, optim) in CASES.items():
        config = make_config(
            dropout=0.3, optim=optim, checkpoint=EVERY_STEP, accumulate=2, batch_size=16, samples=48
        )
        interrupted_at(4, 2, config, task, tmp_path / name / "killed")
        jobs += [(config, task, tmp_path / name / run) for run in ("whole", "killed")]
    train_each_on(2, *jobs)
    for name, (task, _) in CASES.items():
        killed, whole = (newest(tmp_path / name / run) for run in ("killed", "whole"))
        assert_same_bits(killed, whole)
        groups = whole.documents["optimizer"]["groups"]
        assert len(groups) == {OwnOptimizer: 2, OwnClass: 6, Everything: 2}[task]


def test_the_rates_are_each_groups_own_times_the_factor(tmp_path: Path) -> None:
    config = make_config(optim=OptimConfig(lr=7.0, schedule="constant"), steps=6)
    train_here(config, OwnOptimizer, tmp_path)
    events = list(read_events(tmp_path / "events" / "rank-00000.jsonl"))
    (start,) = [event for event in events if event["kind"] == "start"]
    assert start["lr"] == 0.05
    # Steps 2, 4 and 6 were the second, fourth and sixth: numbers 1, 3 and 5.
    logged = [event["lr"] for event in events if event["kind"] == "train"]
    assert logged == pytest.approx([0.05, 0.05 * (1 - 3 / 6), 0.05 * (1 - 5 / 6)])
    groups = newest(tmp_path).documents["optimizer"]["groups"]
    saved = [dict(group["settings"]["dict"])["lr"] for group in groups]
    assert saved == pytest.approx([0.05 / 6, 0.01 / 6])


@pytest.mark.soak
def test_elastic_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    config = elastic(shards=4, batch_size=16, samples=48, checkpoint=EVERY_STEP)
    for world_size in (1, 2):
        run = [tmp_path / f"{world_size} {name}" for name in ("own", "muon")]
        train_each_on(
            world_size,
            (config, OwnClass, run[0]),
            (replace(config, optim=MUON), Everything, run[1]),
        )
    for name in ("own", "muon"):
        left, right = (newest(tmp_path / f"{world_size} {name}") for world_size in (1, 2))
        for file in ("model", "optimizer"):
            assert left.tensors[file].keys() == right.tensors[file].keys()
            assert all(
                torch.equal(one, right.tensors[file][key])
                for key, one in left.tensors[file].items()
            )


class SkipsNaN(Breaks):
    def on_device(self, batch: Any) -> Any:
        return (*batch, "prepared")

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, targets, _ = batch
        return super().loss(model, (inputs, targets))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Rprop(model.parameters(), lr=0.01)


def test_updates_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    config = make_config(on_nan="skip", epochs=2, checkpoint=EVERY_STEP)
    assert train_on(2, config, SkipsNaN, tmp_path).step == 10
    tensors = newest(tmp_path).tensors
    values: list[Tensor] = [*tensors["model"].values(), *tensors["optimizer"].values()]
    assert all(bool(torch.isfinite(value).all()) for value in values)
    steps = {
        float(tensor) for name, tensor in tensors["optimizer"].items() if name.endswith("/step")
    }
    assert steps == {8.0}  # one update of each epoch was left out
    events = read_events(tmp_path / "events" / "rank-00000.jsonl")
    (warning, *_) = [
        event["message"] for event in events if "were skipped" in event.get("message", "")
    ]
    assert "0 (Fragile) is the first module with a non-finite output" in warning


def test_another_optimizer_of_the_task_does_not_get_the_state(tmp_path: Path) -> None:
    train_here(make_config(steps=2, checkpoint=EVERY_STEP), OwnClass, tmp_path)
    with pytest.raises(
        OptimizerMismatchError, match="the optimizer is Momentum in the checkpoint and NAdam here"
    ):
        train_here(make_config(steps=4, checkpoint=EVERY_STEP), OwnOptimizer, tmp_path)


def test_a_name_that_is_not_there_stops_the_run_before_training(tmp_path: Path) -> None:
    config = make_config(optim=OptimConfig(name="torch.optim.NAdm"), steps=2)
    with pytest.raises(UsageError, match=r"torch\.optim has no class 'NAdm'; did you mean 'NAdam'"):
        train_here(config, Classify, tmp_path)
