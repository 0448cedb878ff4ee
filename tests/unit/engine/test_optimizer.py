from __future__ import annotations

from typing import Any

import pytest

from drumline.config.schema import OptimConfig
from drumline.engine.optimizer import peak_rate, rate_factor


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
    assert factors("step", 6, step_every=2, step_factor=0.1) == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_warm_up_delays_the_shape() -> None:
    assert factors("step", 4, warmup_steps=2, step_every=1, step_factor=0.5) == [0.5, 1.0, 1.0, 0.5]


def test_past_the_end_the_rate_stays() -> None:
    assert rate_factor(OptimConfig(schedule="cosine", final_lr_ratio=0.1), 99, total_steps=10) == pytest.approx(0.1)


@pytest.mark.parametrize(("rule", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_a_growing_batch_scales_the_rate(rule: str, rate: float) -> None:
    assert peak_rate(OptimConfig(lr=0.1, scale_lr=rule), world_size=4) == pytest.approx(rate)
