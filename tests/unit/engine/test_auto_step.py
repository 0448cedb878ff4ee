"""`--train.step auto`: every kind of step is tried in the run, and the fastest is kept and reported."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from drumline.data.loader import Step
from drumline.data.sharding import Cursor, Sharding, plan_step
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
