"""A NaN inside a captured or compiled step is found as in an eager one, and its update left out;
eager also runs on the CPU."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drumline.checkpoint import store
from drumline.config.schema import CheckpointConfig, Config, LogConfig, OptimConfig
from drumline.data.sharding import permute
from drumline.runs import catalog
from drumline.runs.events import read_events
from tests.jobs import Classify, Points, make_config, newest, train_on
from tests.ranks import RanksFailed

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# By then the steps have long been captured; one epoch, so the sample comes once.
FIRST_BAD = 31
STEPS = 40
BATCH = 8
MARK = 1234.5


class Fragile(nn.Module):
    """Its output is NaN for one sample."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.where(inputs == MARK, math.nan, inputs)


class LateNan(Classify):
    def model(self) -> nn.Module:
        # Compiler processes would outlive a rank that fails for some seconds.
        importlib.import_module("torch._inductor.config").compile_threads = 1
        return nn.Sequential(Fragile(), *super().model())

    def train_data(self) -> Any:
        points = Points(self.config.data.samples)
        length = self.config.data.samples
        order = permute(np.arange(length), length=length, seed=0, epoch=0).tolist()
        points.inputs[order[(FIRST_BAD - 1) * BATCH], 3] = MARK
        return points


def config_of(on_nan: str, step: str, optimizer: str) -> Config:
    optim = OptimConfig(name=optimizer, lr=0.01, schedule="constant")  # type: ignore[arg-type]
    settings: dict[str, Any] = {
        "on_nan": on_nan,
        "step": step,
        "optim": optim,
        "deterministic": True,
    }
    checkpoint = CheckpointConfig(every_steps=FIRST_BAD, keep_last=9)
    config = make_config(
        samples=STEPS * BATCH, batch_size=BATCH, epochs=1, checkpoint=checkpoint, **settings
    )
    return replace(config, log=LogConfig(every_steps=8, display="none"))


WAYS = [
    "eager",
    *(pytest.param(way, marks=needs_gpu) for way in ("compile", "graph", "compiled_graph")),
]


@pytest.mark.parametrize("step", WAYS)
def test_it_stops_and_names_step_and_module(tmp_path: Path, step: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        train_on(1, config_of("stop", step, "adamw"), LateNan, tmp_path)
    assert "the loss is not finite: 0 (Fragile) is the first module" in str(failed.value)
    assert f"step {FIRST_BAD}]" in str(failed.value)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_captured_step_leaves_out_the_update_that_an_eager_one_does(
    tmp_path: Path, optimizer: str
) -> None:
    ways = ("eager", "graph") if torch.cuda.is_available() else ("eager",)
    for step in ways:
        train_on(1, config_of("skip", step, optimizer), LateNan, tmp_path / step)
        events = list(read_events(tmp_path / step / "events" / "rank-00000.jsonl"))
        messages = [event["message"] for event in events if event["kind"] == "warning"]
        assert [
            f"were skipped: 1, the first at step {FIRST_BAD} " in message for message in messages
        ] == [True]
        [after] = [
            event["loss"] for event in events if event["kind"] == "train" and event["step"] == STEPS
        ]
        assert math.isfinite(after)
    eager, last = (newest(tmp_path / step).tensors["model"] for step in (ways[0], ways[-1]))
    at_the_nan = store.read(
        tmp_path / "eager" / "checkpoints" / catalog.folder_name(FIRST_BAD)
    ).tensors["model"]
    for name, tensor in eager.items():
        assert bool(torch.isfinite(tensor).all())
        assert not torch.equal(tensor, at_the_nan[name]), (
            "training continues after the skipped update"
        )
        # A captured rate is a float32, which shows in the ninth digit of a float64 weight.
        torch.testing.assert_close(tensor, last[name], rtol=1e-6, atol=1e-6)
