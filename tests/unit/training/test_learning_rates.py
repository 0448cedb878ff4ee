from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drumline.base.errors import UsageError
from drumline.config.schema import OptimConfig
from drumline.training.job.optimizer import LearningRates, peak_rate, rate_factor


def factors(schedule: str, total_steps: int, **settings: Any) -> list[float]:
    optim = OptimConfig(schedule=schedule, **settings)
    return [rate_factor(optim, step, total_steps=total_steps) for step in range(total_steps)]


def test_warm_up_rises_in_equal_parts_and_reaches_the_peak() -> None:
    assert factors("constant", 6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_its_final_share() -> None:
    rates = factors("linear", 5, final_lr_ratio=0.5)
    assert rates == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert rate_factor(OptimConfig(schedule="linear", final_lr_ratio=0.5), 5, total_steps=5) == 0.5


def test_cosine_is_half_way_in_the_middle() -> None:
    rates = factors("cosine", 100)
    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(0.5)
    assert rates == sorted(rates, reverse=True)


def test_step_drops_by_its_factor() -> None:
    assert factors("step", 6, step_every=2, step_factor=0.1) == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )


def test_warm_up_delays_the_shape() -> None:
    assert factors("step", 4, warmup_steps=2, step_every=1, step_factor=0.5) == [0.5, 1.0, 1.0, 0.5]


def test_past_the_end_the_rate_stays() -> None:
    assert rate_factor(
        OptimConfig(schedule="cosine", final_lr_ratio=0.1), 99, total_steps=10
    ) == pytest.approx(0.1)


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_a_growing_batch_scales_the_rate(rule: str, rate: float) -> None:
    assert peak_rate(OptimConfig(lr=0.1, scale_lr=rule), world_size=4) == pytest.approx(rate)


def test_every_group_has_its_own_rate_times_the_factor_of_the_step() -> None:
    first = nn.Linear(4, 6)
    second = nn.Linear(2, 2)
    optimizer = SGD(
        [{"params": first.parameters(), "lr": 0.5}, {"params": second.parameters(), "lr": 0.01}]
    )
    rates = LearningRates(
        optimizer, OptimConfig(schedule="linear"), lambda step, total: None if step else 3.0
    )
    assert rates.peak == 0.5
    rates.set(0, 4)
    assert [group["lr"] for group in optimizer.param_groups] == [1.5, 0.03]
    optimizer.load_state_dict(optimizer.state_dict())  # which replaces the groups
    rates.set(2, 4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.005]


def test_the_rate_in_the_log_is_of_the_group_with_the_highest_peak_like_the_header() -> None:
    first = nn.Linear(4, 6)
    second = nn.Linear(2, 2)
    optimizer = SGD(
        [{"params": first.parameters(), "lr": 0.01}, {"params": second.parameters(), "lr": 0.5}]
    )
    rates = LearningRates(optimizer, OptimConfig(schedule="linear"), lambda step, total: None)
    rates.set(2, 4)
    assert (rates.peak, rates.highest()) == (0.5, 0.25)


@pytest.mark.parametrize("factor", [-0.1, float("nan"), "1", torch.tensor(1.0)])
def test_a_schedule_that_gives_no_factor_is_refused(factor: Any) -> None:
    rates = LearningRates(
        SGD(nn.Linear(2, 2).parameters(), lr=0.5), OptimConfig(), lambda step, total: factor
    )
    with pytest.raises(
        UsageError,
        match=re.escape(f"schedule(3, 9) returned {factor!r}, not a factor of 0 or more"),
    ):
        rates.set(3, 9)
