"""On a GPU: without `--train.step` a run tries all kinds of steps where that is safe, and logs its
choice."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drumline.config.schema import Config, DistConfig, LogConfig
from drumline.data.loader import Step
from drumline.rank.determinism import CUBLAS_WORKSPACE, use_deterministic_kernels
from drumline.training import run as train_module
from drumline.training.steps import choice
from drumline.training.steps.graph import GraphStep
from drumline.training.tasks import ImageClassification
from drumline.training.tasks.hook import Hook, Run
from drumline.training.tasks.ready_hooks import EMA, Unfreeze
from tests.gpu.test_graph_step_cuda import (
    STEPS_OF_AN_EPOCH,
    assert_same_state,
    digits,
    messages,
    train_here,
)
from tests.gpu.test_own_optimizer_cuda import OwnNAdam
from tests.jobs import assert_same_bits, newest
from tests.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
LONG = 20 * STEPS_OF_AN_EPOCH


def by_default(steps: int = LONG, **settings: Any) -> Config:
    config = digits(
        "eager", steps=steps, **{"precision": "bf16", "deterministic": False, **settings}
    )
    return replace(config, train=replace(config.train, step=None))


def sentence(run: Path) -> str:
    [message] = [message for message in messages(run) if message.startswith("steps run as ")]
    return message


class Averaged(ImageClassification):
    def hooks(self) -> list[Hook]:
        return [EMA(0.9)]


class OfMine(Hook):
    def after_step(self, run: Run) -> None:
        pass


class WithHook(ImageClassification):
    def hooks(self) -> list[Hook]:
        return [OfMine()]


class Thawed(ImageClassification):
    def hooks(self) -> list[Hook]:
        return [Unfreeze("stem", at_step=20)]


class Hooked(ImageClassification):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_forward_hook(lambda *_: None)
        return model


def test_a_run_of_seconds_is_captured_but_not_compiled_and_resumes_with_its_choice(
    tmp_path: Path,
) -> None:
    run_ranks(1, train_here, by_default(), tmp_path, Averaged)
    logged = sentence(tmp_path)
    assert "not tried: compile, compiled_graph (the run takes " in logged
    chosen = logged.removeprefix("steps run as ").partition(",")[0]
    assert chosen in ("eager", "graph")
    assert newest(tmp_path).documents["progress"]["facts"]["step"] == chosen
    run_ranks(1, train_here, by_default(LONG + STEPS_OF_AN_EPOCH), tmp_path, Averaged)
    assert sentence(tmp_path) == logged, "it is not tried again"
    assert newest(tmp_path).documents["progress"]["facts"]["step"] == chosen


def try_all(config: Config, run: Path) -> None:
    choice.SHORTEST_COMPILED_S = 0.0
    train_here(config, run)


def test_a_long_run_tries_all_kinds(tmp_path: Path) -> None:
    run_ranks(1, try_all, by_default(), tmp_path)
    logged = sentence(tmp_path)
    assert "not tried" not in logged
    assert all(f"{kind} " in logged for kind in ("eager", "compile", "graph", "compiled_graph"))


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (WithHook, "the hook OfMine may change what a step computes"),
        (Hooked, "MiniResNet has a hook, which a replayed step would not call"),
    ],
    ids=["a hook between steps", "a hook in the model"],
)
def test_what_a_graph_could_get_wrong_is_not_captured(
    tmp_path: Path, task: type, reason: str
) -> None:
    run_ranks(1, train_here, by_default(), tmp_path, task)
    assert f"captured steps are left out: {reason}" in messages(tmp_path)
    assert sentence(tmp_path).startswith("steps run as eager, ")


def test_a_short_run_is_eager_and_logs_it(tmp_path: Path) -> None:
    run_ranks(1, train_here, by_default(30), tmp_path)
    assert (
        sentence(tmp_path)
        == "steps run as eager: 30 are too few to try others (--train.step auto tries them)"
    )


@pytest.mark.parametrize("traced", [False, True])
def test_where_bits_must_repeat_it_is_eager_and_logs_nothing(tmp_path: Path, traced: bool) -> None:
    config = by_default(2 * STEPS_OF_AN_EPOCH, deterministic=not traced)
    if traced:
        config = replace(config, log=LogConfig(trace=True, display="none"))
    run_ranks(1, train_here, config, tmp_path / "default")
    eager = replace(config, train=replace(config.train, step="eager"))
    run_ranks(1, train_here, eager, tmp_path / "eager")
    assert not [message for message in messages(tmp_path / "default") if "steps run" in message]
    if not traced:
        assert_same_state(newest(tmp_path / "eager"), newest(tmp_path / "default"))


@pytest.mark.parametrize("step", [None, "auto"])
def test_auto_does_not_capture_steps_whose_parameters_are_unfrozen(
    tmp_path: Path, step: str | None
) -> None:
    config = replace(by_default(), dist=DistConfig(find_unused_parameters=True))
    run_ranks(
        1, train_here, replace(config, train=replace(config.train, step=step)), tmp_path, Thawed
    )
    assert (
        "captured steps are left out: the hook Unfreeze may change what a step computes"
        in messages(tmp_path)
    )
    assert sentence(tmp_path).startswith("steps run as eager, ")


def test_a_captured_run_with_unfreeze_is_refused_also_if_resumed_without_its_setting(
    tmp_path: Path,
) -> None:
    """Its steps are those that the run began with."""
    run_ranks(1, train_here, digits("graph", steps=STEPS_OF_AN_EPOCH), tmp_path)
    longer = digits("graph", steps=2 * STEPS_OF_AN_EPOCH)
    for step in ("graph", None):
        config = replace(longer, train=replace(longer.train, step=step))
        with pytest.raises(
            RanksFailed, match=r"graph cannot capture the steps of this run: the hook Unfreeze"
        ):
            run_ranks(1, train_here, config, tmp_path, Thawed)


def train_exactly(
    config: Config, run: Path, fastest: str, forget_after: int | None = None
) -> tuple[bool, set[str]]:
    """With kernels that repeat their bits, and the choice of `auto` given: whether the optimizer
    can be captured in the end, and where it counts its steps."""
    os.environ[CUBLAS_WORKSPACE[0]] = CUBLAS_WORKSPACE[1]
    use_deterministic_kernels()
    steps = list[choice.AutoStep]()
    jobs = []
    make_step = train_module.make_step

    def make_and_keep(job: Any, *args: Any, **given: Any) -> Any:
        jobs.append(job)
        steps.append(make_step(job, *args, **given))
        return steps[-1]

    train_module.make_step = make_and_keep
    choice._seconds_between = lambda *_: 0.001 if steps[-1]._name == fastest else 0.002
    train_here(config, run, OwnNAdam, forget_after)
    optimizer = jobs[-1].optimizer
    [capturable] = {group["capturable"] for group in optimizer.param_groups}
    return capturable, {state["step"].device.type for state in optimizer.state.values()}


@pytest.mark.parametrize("fastest", ["eager", "graph"])
def test_a_run_that_is_killed_after_its_choice_resumes_bit_for_bit(
    tmp_path: Path, fastest: str
) -> None:
    """Its optimizer is not fused: if it can be captured, torch rounds differently."""
    config = by_default(precision="fp32")
    expected = (True, {"cuda"}) if fastest == "graph" else (False, {"cpu"})
    for run in ("whole", "resumed"):
        assert run_ranks(1, train_exactly, config, tmp_path / run, fastest) == [expected]
        assert newest(tmp_path / run).documents["progress"]["facts"]["step"] == fastest
    # 64 steps of trial; of the 20 checkpoints the last 10 are kept.
    after = LONG - 5 * STEPS_OF_AN_EPOCH
    assert run_ranks(1, train_exactly, config, tmp_path / "resumed", fastest, after) == [expected]
    assert_same_bits(newest(tmp_path / "whole"), newest(tmp_path / "resumed"))


def test_a_short_run_by_default_has_the_bits_of_an_eager_one(tmp_path: Path) -> None:
    """Also with an optimizer that rounds differently if it can be captured."""
    config = by_default(2 * STEPS_OF_AN_EPOCH, precision="fp32")
    assert run_ranks(1, train_exactly, config, tmp_path / "default", "") == [(False, {"cpu"})]
    eager = replace(config, train=replace(config.train, step="eager"))
    assert run_ranks(1, train_exactly, eager, tmp_path / "eager", "") == [(False, {"cpu"})]
    assert_same_state(newest(tmp_path / "eager"), newest(tmp_path / "default"))


def test_a_run_that_has_finished_by_default_is_not_refused_with_auto(tmp_path: Path) -> None:
    run_ranks(1, train_here, by_default(), tmp_path)
    config = by_default()
    run_ranks(1, train_here, replace(config, train=replace(config.train, step="auto")), tmp_path)
    assert any(message.startswith("this run has finished") for message in messages(tmp_path))


def fail_in_the_trial_of_graphs(config: Config, run: Path) -> None:
    def no_memory(self: GraphStep, step: Step) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    GraphStep.__call__ = no_memory  # type: ignore[method-assign]
    train_here(config, run)


def test_a_kind_that_runs_out_of_memory_is_not_tried_at_the_next_start(tmp_path: Path) -> None:
    with pytest.raises(
        RanksFailed, match=r"TrialError: out of memory while --train.step auto tried graph: "
    ):
        run_ranks(1, fail_in_the_trial_of_graphs, by_default(), tmp_path)
    run_ranks(1, fail_in_the_trial_of_graphs, by_default(), tmp_path)
    reason = "graph steps are not tried: the run failed at an earlier start while it tried them"
    assert any(message.startswith(reason) for message in messages(tmp_path))
    assert sentence(tmp_path).startswith("steps run as eager, ")
