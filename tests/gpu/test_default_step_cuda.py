"""On a GPU: without `--train.step` a run tries all kinds of steps where that is safe, and says what it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drumline.config.schema import Config, LogConfig
from drumline.engine.steps import choice
from drumline.tasks import ImageClassification
from drumline.tasks.hook import Hook, Run
from drumline.tasks.ready_hooks import EMA
from tests.gpu.test_graph_step_cuda import STEPS_OF_AN_EPOCH, assert_same_state, digits, messages, train_here
from tests.jobs import newest
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
LONG = 20 * STEPS_OF_AN_EPOCH


def by_default(steps: int = LONG, **settings: Any) -> Config:
    config = digits("eager", precision="bf16", steps=steps, **{"deterministic": False, **settings})
    return replace(config, train=replace(config.train, step=None))


def sentence(run: Path) -> str:
    [said] = [message for message in messages(run) if message.startswith("steps run as ")]
    return said


class Averaged(ImageClassification):
    def hooks(self) -> list[Hook]:
        return [EMA(0.9)]


class OfMine(Hook):
    def after_step(self, run: Run) -> None:
        pass


class WithHook(ImageClassification):
    def hooks(self) -> list[Hook]:
        return [OfMine()]


class Hooked(ImageClassification):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_forward_hook(lambda *_: None)
        return model


def test_a_run_of_seconds_is_captured_but_not_compiled_and_resumes_with_its_choice(tmp_path: Path) -> None:
    run_ranks(1, train_here, by_default(), tmp_path, Averaged)
    said = sentence(tmp_path)
    assert "not tried: compile, compiled_graph (the run takes " in said
    chosen = said.removeprefix("steps run as ").partition(",")[0]
    assert chosen in ("eager", "graph")
    assert newest(tmp_path).documents["progress"]["facts"]["step"] == chosen
    run_ranks(1, train_here, by_default(LONG + STEPS_OF_AN_EPOCH), tmp_path, Averaged)
    assert sentence(tmp_path) == said, "it is not tried again"
    assert newest(tmp_path).documents["progress"]["facts"]["step"] == chosen


def try_all(config: Config, run: Path) -> None:
    choice.SHORTEST_COMPILED_S = 0.0
    train_here(config, run)


def test_a_long_run_tries_all_kinds(tmp_path: Path) -> None:
    run_ranks(1, try_all, by_default(), tmp_path)
    said = sentence(tmp_path)
    assert "not tried" not in said
    assert all(f"{kind} " in said for kind in ("eager", "compile", "graph", "compiled_graph"))


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (WithHook, "the hook OfMine may change what a step computes"),
        (Hooked, "MiniResNet has a hook, which a replayed step would not call"),
    ],
    ids=["a hook between steps", "a hook in the model"],
)
def test_what_a_graph_could_get_wrong_is_not_captured(tmp_path: Path, task: type, reason: str) -> None:
    run_ranks(1, train_here, by_default(), tmp_path, task)
    assert f"captured steps are left out: {reason}" in messages(tmp_path)
    assert sentence(tmp_path).startswith("steps run as eager, ")


def test_a_short_run_is_eager_and_says_so(tmp_path: Path) -> None:
    run_ranks(1, train_here, by_default(30), tmp_path)
    assert sentence(tmp_path) == "steps run as eager: 30 are too few to try others (--train.step auto tries them)"


@pytest.mark.parametrize("traced", [False, True])
def test_where_bits_must_repeat_it_is_eager_without_a_word(tmp_path: Path, traced: bool) -> None:
    config = by_default(2 * STEPS_OF_AN_EPOCH, deterministic=not traced)
    if traced:
        config = replace(config, log=LogConfig(trace=True, display="none"))
    run_ranks(1, train_here, config, tmp_path / "default")
    eager = replace(config, train=replace(config.train, step="eager"))
    run_ranks(1, train_here, eager, tmp_path / "eager")
    assert not [message for message in messages(tmp_path / "default") if "steps run" in message]
    if not traced:
        assert_same_state(newest(tmp_path / "eager"), newest(tmp_path / "default"))
