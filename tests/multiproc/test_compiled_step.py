"""`--train.step compile` on the CPU: the same training as operation by operation, and a fall back in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.config.schema import DistConfig, OptimConfig
from drumline.metrics.events import read_events
from drumline.tasks.base import Loss
from tests.jobs import Classify, make_config, newest, train_here, train_on
from tests.ranks import run_ranks


class TwoHeads(nn.Module):
    """One is trained, the other is only looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.probe = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(inputs))
        return self.head(hidden), self.probe(hidden)


class Probed(Classify):
    """A loss with all that it may have: a weight on the device, a count, and a metric that has a graph."""

    def model(self) -> nn.Module:
        return TwoHeads().double()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        scores, probed = model(inputs)
        return Loss(
            functional.cross_entropy(scores, targets, reduction="sum"),
            weight=(targets + 1).sum(),
            metrics={
                "accuracy": (scores.argmax(1) == targets).sum(),
                "probe": functional.cross_entropy(probed, targets, reduction="sum"),
            },
        )


def train_without_a_compiler(run: Path) -> None:
    import torch._inductor.config as inductor

    inductor.cpp.cxx = ("no-such-compiler",)
    inductor.force_disable_caches = True
    train_here(make_config(epochs=1, step="compile"), Classify, run)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events" / "rank-00000.jsonl") if event["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "train")]


def test_compiled_steps_train_as_eager_ones_do_on_two_ranks(tmp_path: Path) -> None:
    """And what is only measured is not trained in either: it does not decay."""
    for step in ("eager", "compile"):
        config = make_config(epochs=1, step=step, optim=OptimConfig(lr=0.1, weight_decay=0.1))
        config = replace(config, dist=DistConfig(find_unused_parameters=True))
        train_on(2, config, Probed, tmp_path / step)
    assert losses(tmp_path / "compile") == pytest.approx(losses(tmp_path / "eager"), rel=1e-9)
    torch.testing.assert_close(*(newest(tmp_path / step).tensors["model"] for step in ("compile", "eager")))
    assert not events(tmp_path / "compile", "warning")


def test_what_cannot_be_compiled_falls_back_with_a_sentence(tmp_path: Path) -> None:
    run_ranks(1, train_here, make_config(epochs=1), Classify, tmp_path / "eager")
    run_ranks(1, train_without_a_compiler, tmp_path / "compile")
    [warning] = events(tmp_path / "compile", "warning")
    assert warning["message"].startswith(
        "steps are not compiled but run operation by operation, because torch.compile failed: "
    )
    assert "compiler" in warning["message"]
    assert losses(tmp_path / "compile") == losses(tmp_path / "eager")
