"""What a rank's own Python costs, in real profiles of small jobs: hooks, lines, evaluations, saves,
a rank that stalls in some steps."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drumline.config.schema import Config
from drumline.report.profile.advice import advise
from drumline.report.profile.profile_words import words_of
from drumline.tools.profile.profile_analysis import analyse
from drumline.training.tasks.base import Loss
from drumline.training.tasks.hook import Hook, Run
from tests.jobs import Classify, make_config, train_on


class SlowHook(Hook):
    def after_step(self, run: Run) -> None:
        time.sleep(0.2)


class SlowInMany(Classify):
    """A hook that sleeps, Python in the loss, an `on_device` that waits."""

    def hooks(self) -> Sequence[Hook]:
        return [SlowHook()]

    def on_device(self, batch: Any) -> Any:
        time.sleep(0.15)
        return batch

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        until = time.perf_counter() + 0.17
        while model.training and time.perf_counter() < until:
            sum(range(50))
        return super().loss(model, batch)


def profiled(config: Config) -> Config:
    return replace(config, log=replace(config.log, profile="4:10", every_steps=1))


@pytest.mark.soak  # shares of a step differ too much beside other work
def test_each_cost_is_named_by_its_phase_and_line(tmp_path: Path) -> None:
    config = profiled(make_config(batch_size=8, samples=160, steps=11))
    config = replace(config, train=replace(config.train, eval_every_steps=3, eval_every_epochs=0))
    train_on(1, config, SlowInMany, tmp_path)
    result = analyse(tmp_path)
    assert sum(result.phases_s.values()) == pytest.approx(result.step_s, rel=0.02)
    assert result.phases_s["rest"] < 0.2 * result.step_s
    assert result.num_steps == 4, "two of six steps were followed by an evaluation"
    assert result.pauses_s["evaluation"] > 0
    costs = [item.cost_s for item in advise(result)]
    assert costs == sorted(costs, reverse=True)
    texts = {item.bottleneck: item.text for item in advise(result)}
    assert "SlowHook.after_step: time.sleep(0.2)" in texts["hook"]
    assert "time.sleep(0.15)" in texts["on_device"]
    assert texts["python"].startswith("your code runs Python")
    assert "test_profiled_host.py" in texts["python"]
    assert "evaluation" in texts
    assert any(line.startswith("  hook SlowHook") for line in words_of(result))
    optimizer = result.optimizer
    assert optimizer is not None
    assert (optimizer.name, optimizer.num_tensors, optimizer.is_fused) == ("SGD", 4, True)


class StallsInSomeSteps(Classify):
    """Rank 1 stalls in every third step, which is not most of them."""

    num_steps = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.num_steps += 1
        if dist.get_rank() == 1 and self.num_steps % 3 == 0:
            time.sleep(0.6)
        if dist.get_rank() == 0:  # a little later than rank 1 in all other steps
            torch.zeros(1).item()
        return super().loss(model, batch)


@pytest.mark.soak
@pytest.mark.world_size(2)
def test_a_rank_that_stalls_in_some_steps_is_the_slow_rank(tmp_path: Path) -> None:
    config = profiled(make_config(batch_size=8, samples=160, steps=13))
    config = replace(config, log=replace(config.log, profile="3:12", every_steps=20))
    train_on(2, config, StallsInSomeSteps, tmp_path)
    first = advise(analyse(tmp_path))[0]
    assert first.bottleneck == "slow_rank"
    assert first.text.startswith("rank 1 on ")
    assert "StallsInSomeSteps.loss: time.sleep(0.6)" in first.text
    # More than the stalled ones where other processes use the cores.
    assert re.search(r"they wait for it in [3-8] of 9 steps", first.derivation)
