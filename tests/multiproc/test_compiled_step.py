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
from tests.jobs import Classify, make_config, newest, train_here
from tests.ranks import run_ranks

# The last of its five batches is short, and not compiled.
SHORT = replace(
    make_config(epochs=1, optim=OptimConfig(lr=0.1, weight_decay=0.1)),
    dist=DistConfig(find_unused_parameters=True),
)


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


def train_in_all_ways(runs: Path) -> None:
    """One after the other in one process: to load torch's compiler takes longer than all of them."""
    train_here(SHORT, Probed, runs / "eager")
    compiled = replace(SHORT, train=replace(SHORT.train, step="compile"))
    train_here(compiled, Probed, runs / "compile")

    import torch._dynamo
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    inductor.cpp.cxx = ("no-such-compiler",)
    inductor.force_disable_caches = True
    train_here(compiled, Probed, runs / "without a compiler")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events" / "rank-00000.jsonl") if event["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "train")]


def test_on_two_ranks_it_is_the_same_training_with_a_compiler_and_without(tmp_path: Path) -> None:
    """And what is only measured is trained in none of them: it does not decay."""
    run_ranks(2, train_in_all_ways, tmp_path)
    eager = losses(tmp_path / "eager")
    assert len(eager) == 3
    assert losses(tmp_path / "compile") == pytest.approx(eager, rel=1e-9)
    torch.testing.assert_close(*(newest(tmp_path / step).tensors["model"] for step in ("compile", "eager")))
    assert not events(tmp_path / "compile", "warning")
    [warning] = events(tmp_path / "without a compiler", "warning")
    assert warning["message"].startswith(
        "steps are not compiled but run operation by operation, because torch.compile failed: "
    )
    assert "compiler" in warning["message"]
    assert losses(tmp_path / "without a compiler") == eager
