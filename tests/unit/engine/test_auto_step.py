"""`--train.step auto`: every kind of step is tried in the run, and the fastest is kept and reported."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drumline.config.schema import Config, LogConfig, TrainConfig
from drumline.data.loader import Step
from drumline.data.sharding import Cursor, Sharding, plan_step
from drumline.engine.job import choose_step, flat
from drumline.engine.run_context import RunRequest, changed_settings
from drumline.engine.steps import choice
from drumline.engine.steps.choice import TIMED_STEPS, WARM_UP_STEPS, AutoStep

PLAN = plan_step(Cursor(), length=64, sharding=Sharding(batch_size=8, rank=0, world_size=1))


class Way:
    """A step that takes a while."""

    def __init__(self, name: str, seconds: float, taken: list[str]) -> None:
        self.grad_norm: Tensor | None = torch.tensor(seconds)
        self._name, self._seconds, self._taken = name, seconds, taken

    def __call__(self, step: Step) -> None:
        self._taken.append(self._name)
        time.sleep(self._seconds)


def test_each_way_is_tried_in_turn_and_the_fastest_is_kept() -> None:
    taken: list[str] = []
    chosen: list[str] = []
    said: list[str] = []
    seconds = {"slow": 4e-3, "fast": 2e-4, "middling": 2e-3}
    auto = AutoStep(
        {name: lambda name=name: Way(name, seconds[name], taken) for name in seconds},  # type: ignore[misc]
        device=torch.device("cpu"),
        on_choice=chosen.append,
        note=said.append,
    )
    each = WARM_UP_STEPS + TIMED_STEPS
    for _ in range(3 * each + 5):
        auto(Step(PLAN, iter(())))
        assert auto.grad_norm == torch.tensor(seconds[taken[-1]])

    assert taken == ["slow"] * each + ["fast"] * each + ["middling"] * each + ["fast"] * 5
    assert chosen == ["fast"]
    [sentence] = said
    assert sentence.startswith("steps run as fast, the fastest here; time per step relative to it: slow ")
    assert "fast 1.00" in sentence


def test_what_happens_between_steps_says_nothing_about_a_way() -> None:
    """An evaluation, say, that falls into the trial of the fastest."""
    taken: list[str] = []
    chosen: list[str] = []
    seconds = {"fast": 1e-4, "slow": 2e-3}
    auto = AutoStep(
        {name: lambda name=name: Way(name, seconds[name], taken) for name in seconds},  # type: ignore[misc]
        device=torch.device("cpu"),
        on_choice=chosen.append,
        note=lambda _: None,
    )
    for number in range(2 * (WARM_UP_STEPS + TIMED_STEPS)):
        auto(Step(PLAN, iter(())))
        if number == WARM_UP_STEPS + 3:
            time.sleep(0.1)
    assert chosen == ["fast"]


def kinds_tried(*, num_steps: int | None, is_full: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """On this device each step takes a tenth of a second on average, as far as anybody measures."""
    monkeypatch.setattr(choice, "_seconds_between", lambda begin, end: 0.1)
    monkeypatch.setattr(choice, "_is_memory_used", lambda device: is_full)
    taken: list[str] = []
    said: list[str] = []
    auto = AutoStep(
        {
            name: lambda name=name: Way(name, 0.0, taken)  # type: ignore[misc]
            for name in ("eager", "compile", "graph", "compiled_graph")
        },
        device=torch.device("cpu"),
        num_steps=num_steps,
        on_choice=lambda _: None,
        note=said.append,
    )
    while not said:
        auto(Step(PLAN, iter(())))
    return list(dict.fromkeys(taken)), said[0].partition("eager 1.00")[2]


def test_what_would_cost_more_than_it_gains_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    every = ["eager", "compile", "graph", "compiled_graph"]
    assert kinds_tried(num_steps=3100, is_full=False, monkeypatch=monkeypatch)[0] == every
    assert kinds_tried(num_steps=None, is_full=False, monkeypatch=monkeypatch)[0] == every
    assert kinds_tried(num_steps=2500, is_full=False, monkeypatch=monkeypatch) == (
        ["eager", "graph"],
        ", graph 1.00; not tried: compile, compiled_graph (the run takes 4 min 10 s)",
    )
    assert kinds_tried(num_steps=3100, is_full=True, monkeypatch=monkeypatch) == (
        ["eager", "compile"],
        ", compile 1.00; not tried: graph, compiled_graph (too little memory is left for graphs)",
    )
    assert kinds_tried(num_steps=2500, is_full=True, monkeypatch=monkeypatch)[0] == ["eager"]


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def chosen(device: torch.device, *, began_with: Any = "new", log: LogConfig | None = None, **train: Any) -> str:
    """The kind of step of a new run, or of one that began with this setting."""
    saved = None if began_with == "new" else {"config": {"train.step": began_with}}
    return choose_step(Config(train=TrainConfig(**train), log=log or LogConfig()), device, saved)


def test_the_default_is_auto_on_a_gpu_where_bits_need_not_repeat_and_eager_elsewhere() -> None:
    assert (chosen(CPU), chosen(CUDA)) == ("eager", "auto")
    assert chosen(CUDA, deterministic=True) == chosen(CUDA, exact="elastic") == "eager"
    assert chosen(CUDA, log=LogConfig(trace=True)) == "eager"
    for step in ("eager", "compile", "graph", "auto"):
        assert chosen(CUDA, step=step, began_with="graph") == chosen(CPU, step=step) == step


def test_a_run_continues_as_it_began() -> None:
    """Also one of a version whose default was eager everywhere, or had no such setting."""
    assert chosen(CUDA, began_with=None) == chosen(CUDA, began_with="auto") == "auto"
    assert chosen(CUDA, began_with="eager") == "eager"
    assert chosen(CUDA, began_with="compiled_graph") == "compiled_graph"
    assert choose_step(Config(), CUDA, {"config": {}}) == "eager"
    # Without the GPU that it began on.
    assert chosen(CPU, began_with="compiled_graph") == chosen(CPU, began_with=None) == "eager"
    assert chosen(CPU, began_with="compile") == "compile"


def test_the_default_is_no_change_of_settings_whatever_the_run_began_with() -> None:
    def changes(old: str | None, new: str | None, choice: str | None = None) -> dict[str, tuple[Any, Any]]:
        before = {"task": "mine", "config": flat(Config(train=TrainConfig(step=old))), "step": choice}
        return changed_settings(before, RunRequest("mine", Config(train=TrainConfig(step=new)), Path(), False, ()))

    assert (
        changes("graph", None) == changes(None, None) == changes(None, "eager") == changes(None, "graph", "graph") == {}
    )
    assert changes("graph", "eager") == {"train.step": ("graph", "eager")}
    assert changes(None, "eager", "graph") == {"train.step": ("graph", "eager")}
