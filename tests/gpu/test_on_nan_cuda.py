"""On a GPU: a NaN inside a captured or compiled step is found as in an eager one, and its update left out."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drumline.config.schema import Config, LogConfig, OptimConfig
from tests.jobs import Classify, make_config, newest, train_on
from tests.ranks import RanksFailed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
FIRST_BAD, STEPS = 31, 40


class Tires(nn.Module):
    """Its output is NaN in one step, by which the steps have long been captured."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
        return torch.where(self.calls == FIRST_BAD, math.nan, inputs)


class LateNan(Classify):
    def model(self) -> nn.Module:
        # Compiler processes would outlive a rank that fails for some seconds.
        importlib.import_module("torch._inductor.config").compile_threads = 1
        return nn.Sequential(Tires(), *super().model())


def config_of(on_nan: str, step: str, optimizer: str) -> Config:
    optim = OptimConfig(name=optimizer, lr=0.01, schedule="constant")  # type: ignore[arg-type]
    config = make_config(samples=32, steps=STEPS, on_nan=on_nan, step=step, optim=optim, deterministic=True)
    return replace(config, log=LogConfig(every_steps=8, display="none"))


@pytest.mark.parametrize("step", ["eager", "compile", "graph", "compiled_graph"])
def test_it_stops_and_names_step_and_module(tmp_path: Path, step: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        train_on(1, config_of("stop", step, "adamw"), LateNan, tmp_path)
    assert f"step {FIRST_BAD}]" in str(failed.value)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_captured_step_leaves_out_the_update_that_an_eager_one_does(tmp_path: Path, optimizer: str) -> None:
    for step in ("eager", "graph"):
        train_on(1, config_of("skip", step, optimizer), LateNan, tmp_path / step)
    eager, graph = (newest(tmp_path / step).tensors["model"] for step in ("eager", "graph"))
    for name, tensor in eager.items():
        assert bool(torch.isfinite(tensor).all())
        assert torch.equal(tensor, graph[name]), f"{name} differs"
