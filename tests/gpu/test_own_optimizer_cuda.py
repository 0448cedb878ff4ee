"""On a GPU: steps with an optimizer and an on_device() of the task's own are captured where torch
can do it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, NAdam, Optimizer

from drumline.config.schema import Config, OptimConfig
from drumline.training.steps.graph import CapturedStep
from drumline.training.tasks import ImageClassification
from drumline.training.tasks.base import Loss
from tests.gpu.test_graph_step_cuda import (
    STEPS_OF_AN_EPOCH,
    assert_same_state,
    digits,
    losses,
    messages,
    train_here,
)
from tests.jobs import assert_same_bits, newest
from tests.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class OwnAdam(ImageClassification):
    """Fused, with a rate for each group, a schedule, and noise that is drawn on the GPU."""

    def on_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return images + 0.1 * torch.randn_like(images) if self.training else images, labels

    def optimizer(self, model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        assert first.is_cuda
        return Adam([{"params": [first], "lr": 3e-3}, {"params": others}], lr=1e-3, fused=True)

    def schedule(self, step: int, total_steps: int) -> float:
        return 1 - step / total_steps


class OwnNAdam(OwnAdam):
    """Not fused, but torch can capture it."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return NAdam(model.parameters(), lr=1e-3)


def count_captures(config: Config, run: Path, task: type, forget_after: int | None = None) -> int:
    capture = CapturedStep.__init__
    made = []

    def capture_and_count(self: CapturedStep, *args: Any) -> None:
        capture(self, *args)
        made.append(1)

    CapturedStep.__init__ = capture_and_count
    train_here(config, run, task, forget_after)
    return len(made)


def test_a_captured_run_has_the_bits_of_an_eager_one(tmp_path: Path) -> None:
    results = [
        run_ranks(1, count_captures, digits(step), tmp_path / step, OwnAdam)
        for step in ("eager", "graph")
    ]
    assert results == [[0], [2]]
    assert_same_state(newest(tmp_path / "eager"), newest(tmp_path / "graph"))
    assert losses(tmp_path / "eager") == losses(tmp_path / "graph")


def test_what_torch_can_capture_is_captured_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    for run in ("whole", "resumed"):
        assert run_ranks(1, count_captures, digits("graph"), tmp_path / run, OwnNAdam) == [2]
    # Too few epochs are left to capture the short batch at their end too.
    again = run_ranks(
        1, count_captures, digits("graph"), tmp_path / "resumed", OwnNAdam, 2 * STEPS_OF_AN_EPOCH
    )
    assert again == [1]
    assert_same_bits(newest(tmp_path / "whole"), newest(tmp_path / "resumed"))
    run_ranks(1, train_here, digits("eager"), tmp_path / "eager", OwnNAdam)
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "eager"), rel=0.02)


def test_what_it_cannot_capture_is_refused_and_left_out_by_auto(tmp_path: Path) -> None:
    muon = OptimConfig(name="muon", lr=1e-3)
    sentence = "--train.step graph cannot capture the steps of this run: muon reads"
    with pytest.raises(RanksFailed, match=re.escape(sentence)):
        run_ranks(1, train_here, replace(digits("graph"), optim=muon), tmp_path / "graph")
    auto = replace(digits("auto", deterministic=False, steps=3), optim=muon)
    run_ranks(1, train_here, auto, tmp_path / "auto")
    assert "captured steps are left out: muon reads its rate on the host" in messages(
        tmp_path / "auto"
    )


class TooMuch(ImageClassification):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if self.training:
            torch.empty(2**44, device=batch[0].device)
        return super().loss(model, batch)


def test_out_of_memory_names_the_line_the_peak_and_what_would_fit(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(1, train_here, digits("eager"), tmp_path, TooMuch)
    text = caught.value.errors[0]
    assert re.search(
        r"out of memory at test_own_optimizer_cuda\.py:\d+: CUDA out of memory\. Tried to allocate",
        text,
    )
    assert re.search(r"; the most that this rank has held is [\d.]+ [KMG]iB of [\d.]+ GiB", text)
    assert (
        "--train.micro_batch_size 48, half of the 96 samples that a rank now computes at once"
        in text
    )
