"""What a range test makes of its losses: when it ends, what it suggests, and what it says if there
is nothing to."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from drumline.base.errors import TrainingError
from drumline.cli.find_rank import describe_rate, lr_setting, range_table
from drumline.tools.find.range_test import RangeOptions, RangeTest, diverges, smoothed

OPTIONS = RangeOptions(1e-6, 10.0, 100)


def run_over(
    loss_at: Callable[[float], float],
    *,
    noise: float = 0.0,
    setting: float = 1.0,
    own_optimizer: str | None = None,
) -> RangeTest:
    """A range test whose loss is a function of the rate."""
    draw = random.Random(3)
    rates = list[float]()
    losses = list[float]()
    for step in range(OPTIONS.steps):
        rates.append(OPTIONS.rate(step))
        losses.append(loss_at(rates[-1]) + draw.gauss(0, noise))
        if diverges(losses):
            break
    return RangeTest(rates, losses, diverges(losses), setting, own_optimizer)


def valley(rate: float) -> float:
    """Falls around 0.01, is lowest at 0.21, and diverges above 1."""
    return 2.3 - 2 * rate / (rate + 0.01) + rate**2


def test_rates_grow_by_the_same_factor() -> None:
    rates = [OPTIONS.rate(step) for step in range(OPTIONS.steps)]
    assert (rates[0], rates[-1]) == (pytest.approx(1e-6), pytest.approx(10.0))
    factors = [after / before for before, after in itertools.pairwise(rates)]
    assert factors == pytest.approx([10 ** (7 / 99)] * 99)
    assert RangeOptions(0.1, 1.0, 1).rate(0) == 0.1


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_the_suggestion_is_a_tenth_of_the_rate_with_the_lowest_loss(noise: float) -> None:
    test = run_over(valley, noise=noise)
    assert test.has_diverged
    assert len(test.losses) < OPTIONS.steps
    factor = 1.25 if noise == 0 else 2.5
    assert 0.021 / factor < test.suggestion() < 0.021 * factor


def test_a_loss_may_be_negative() -> None:
    test = run_over(lambda rate: valley(rate) - 4)
    assert 0.021 / 1.25 < test.suggestion() < 0.021 * 1.25
    assert not diverges([-1.0, -2.0, -3.0, -2.9])
    assert diverges([-1.0, -2.0, -3.0, 20.0])


@pytest.mark.parametrize("last", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_has_diverged(last: float) -> None:
    assert diverges([2.3, 2.2, last])
    assert not diverges([2.3, 2.2, 2.4])
    assert diverges([last])


def test_smoothing_does_not_shift_the_lowest_loss() -> None:
    losses = [5.0, 4.0, 3.0, 2.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    smooth = smoothed(losses)
    assert smooth.index(min(smooth)) == 4
    assert smoothed([1.0, 2.0, 3.0, math.nan])[1:] == [math.inf] * 3
    assert smoothed([1.0, 2.0, 3.0, math.nan])[0] == 2.0


@pytest.mark.parametrize(
    "loss_at", [lambda rate: 2.3, lambda rate: 2.3 + rate, lambda rate: math.nan]
)
def test_there_is_no_suggestion_where_the_loss_does_not_fall(
    loss_at: Callable[[float], float],
) -> None:
    for noise in (0.0, 0.05):
        with pytest.raises(
            TrainingError,
            match=r"no rate from 1e-06 to \S+ lowered the loss by more than it varies",
        ) as e:
            run_over(loss_at, noise=noise).suggestion()
        assert e.value.next_step is not None
        assert "--low and --high" in e.value.next_step


def test_there_is_no_suggestion_where_the_loss_still_falls() -> None:
    text = r"the loss was still falling at the highest rate, 10, so the best is above it\n  try: give --high 1e\+03"
    with pytest.raises(TrainingError, match=text):
        run_over(lambda rate: 2.3 - math.log10(1 + rate)).suggestion()


def test_the_table_is_a_plot() -> None:
    test = run_over(valley)
    title, *rows = range_table(test)
    assert title.split() == ["rate", "loss", "smoothed"]
    columns = [row.index("*") for row in rows]
    assert columns[0] > min(columns)
    assert columns[-1] == max(columns)
    assert next(row for row in rows if row.endswith("*  lowest")).startswith(
        f"{test.rates[test.lowest]:>9.2e}"
    )
    assert rows[-1].endswith("*  diverged")
    assert len(rows) <= 28
    shown = [float(row.split()[2]) for row in rows]
    (lowest,) = [row for row in rows if row.endswith("*  lowest")]
    assert float(lowest.split()[2]) == min(shown), "not so the losses themselves"


def test_a_table_without_any_finite_loss() -> None:
    assert [row.split()[1] for row in range_table(run_over(lambda rate: math.nan))] == [
        "loss",
        "nan",
    ]


def test_the_suggestion_names_the_setting() -> None:
    test = run_over(valley)
    rate = test.suggestion()
    assert describe_rate(test, rate) == (
        f"--optim.lr {rate:g}: 1/10 of {test.rates[test.lowest]:.2g}, the rate with the lowest smoothed loss"
    )
    scaled = run_over(valley, setting=0.25)  # --optim.scale_lr linear on four ranks
    assert lr_setting(scaled, 0.02) == 0.005
    of_task = run_over(valley, own_optimizer="Mine.optimizer()")
    assert describe_rate(of_task, 0.02).startswith(
        "Mine.optimizer(): 0.02 as the highest lr of its groups, 1/10 of "
    )
