"""`--train.step compile` on the CPU: the same training as operation by operation, and a fall back in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.metrics.events import read_events
from tests.jobs import Classify, make_config, train_here
from tests.ranks import run_ranks

# The last of its five batches is short, and not compiled.
SHORT = make_config(epochs=1)


def train_in_all_ways(runs: Path) -> None:
    """One after the other in one process: to load torch's compiler takes longer than all of them."""
    train_here(SHORT, Classify, runs / "eager")
    compiled = replace(SHORT, train=replace(SHORT.train, step="compile"))
    train_here(compiled, Classify, runs / "compile")

    import torch._dynamo
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    inductor.cpp.cxx = ("no-such-compiler",)
    inductor.force_disable_caches = True
    train_here(compiled, Classify, runs / "without a compiler")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events" / "rank-00000.jsonl") if event["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "train")]


def test_on_two_ranks_it_is_the_same_training_with_a_compiler_and_without(tmp_path: Path) -> None:
    run_ranks(2, train_in_all_ways, tmp_path)
    eager = losses(tmp_path / "eager")
    assert len(eager) == 3
    assert losses(tmp_path / "compile") == pytest.approx(eager, rel=1e-9)
    assert not events(tmp_path / "compile", "warning")
    [warning] = events(tmp_path / "without a compiler", "warning")
    assert warning["message"].startswith(
        "steps are not compiled but run operation by operation, because torch.compile failed: "
    )
    assert "compiler" in warning["message"]
    assert losses(tmp_path / "without a compiler") == eager
