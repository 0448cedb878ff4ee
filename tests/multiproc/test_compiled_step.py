"""`--train.step compile` on the CPU: the same training as operation by operation, and a fall back in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.metrics.events import read_events
from tests.jobs import Classify, make_config, train_here
from tests.ranks import run_ranks


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
    for step in ("eager", "compile"):
        run_ranks(2, train_here, make_config(epochs=1, step=step), Classify, tmp_path / step)
    assert losses(tmp_path / "compile") == pytest.approx(losses(tmp_path / "eager"), rel=1e-9)
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
