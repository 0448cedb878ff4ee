"""Advice about what a step computes in vain, as one inspected step showed it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from drumline.report.profile.advice import advise
from drumline.report.profile.arithmetic_advice import WASTE
from drumline.report.profile.bottleneck import Advice
from drumline.report.profile.profile_words import headline
from drumline.runs.profile_files import SampledLine, WastedWork, WasteKind
from drumline.runs.profile_result import Kernel, ProfileResult
from tests.unit.report.test_advice import as_script, first, profile

CALL = SampledLine(file="train.py", line=7, function="main", source="scores = model(words)")
PHASES = {"forward": 0.03, "backward": 0.05, "optimizer": 0.02}


def wasting(*works: WastedWork) -> ProfileResult:
    return profile(parts={"exposed_communication": 0.01}, phases_s=PHASES, wasted=works)


def test_every_kind_has_words() -> None:
    assert WASTE.keys() == set(get_args(WasteKind))


@pytest.mark.parametrize("kind", WASTE)
def test_a_kind_of_waste_is_named_first_with_its_module_and_line(kind: WasteKind) -> None:
    advice = first(wasting(WastedWork(kind=kind, part=0.6, module="encoder", line=CALL)))
    assert advice.bottleneck == kind
    assert "train.py:7, in main: scores = model(words): " in advice.text
    assert kind == "padding" or "encoder" in advice.text
    assert advice.saved_s.least <= advice.saved_s.likely <= advice.saved_s.most <= advice.cost_s


def test_padding_costs_its_part_of_both_passes() -> None:
    result = wasting(WastedWork(kind="padding", part=0.75))
    advice: Advice = first(result)
    assert advice.cost_s == pytest.approx(0.75 * 0.08)
    assert advice.text == "75% of a batch is padding: 60 ms of each 100 ms step"
    assert headline(result) == "60% of the step goes to padding"


def test_parts_of_one_kind_are_added_up_and_little_of_it_is_usual() -> None:
    layers = [WastedWork(kind="recomputation", part=0.5, module=f"layer{n}") for n in (1, 2)]
    advice = first(wasting(*layers))
    assert advice.cost_s == pytest.approx(0.03)
    assert "layer1" in advice.text
    for kind in get_args(WasteKind):
        assert advise(wasting(WastedWork(kind=kind, part=0.1))) == advise(wasting())


def test_float64_is_not_made_bf16() -> None:
    products = (Kernel(name="dgemm", seconds=0.08, calls=1),)
    result = replace(profile(), device="NVIDIA H200", kernels=products)
    assert "fp32" in [item.bottleneck for item in advise(result)]
    wasted = (WastedWork(kind="float64", part=0.9),)
    advice = advise(replace(result, wasted=wasted, phases_s=PHASES))
    assert [item.bottleneck for item in advice] == ["float64"], "autocast leaves float64 as it is"


def test_a_profiler_of_the_users_costs_what_steps_without_ours_take_longer() -> None:
    result = replace(profile(), own_profiler=CALL, slow_modes_s=0.15)
    advice = first(result)
    assert (advice.bottleneck, advice.cost_s) == ("own_profiler", pytest.approx(0.15))
    assert advice.predicted_step_s == pytest.approx(0.1)
    assert advice.text == (
        "150 ms of each 250 ms step go to a profiler (torch.profiler at train.py:7, in main: "
        "scores = model(words)), off in the profiled steps"
    )
    assert advise(replace(result, slow_modes_s=0.001)) == ()


def test_a_mode_that_slows_each_operation_costs_what_steps_with_it_take_longer() -> None:
    modes = ("anomaly detection", "a tracer (sys.settrace)")
    advice = first(replace(profile(), slow_modes=modes, slow_modes_s=0.15))
    assert (advice.bottleneck, advice.cost_s) == ("slow_modes", pytest.approx(0.15))
    assert advice.text == (
        "150 ms of each 250 ms step go to anomaly detection and a tracer (sys.settrace), off in the profiled steps"
    )
    assert advice.predicted_step_s == pytest.approx(0.1)


def test_one_advice_names_a_profiler_and_a_mode_that_are_on_together() -> None:
    modes = ("anomaly detection",)
    result = replace(profile(), own_profiler=CALL, slow_modes=modes, slow_modes_s=0.15)
    (advice,) = advise(result)
    assert (advice.bottleneck, advice.cost_s) == ("slow_modes", pytest.approx(0.15))
    assert "go to anomaly detection and a profiler (torch.profiler at train.py:7" in advice.text


@pytest.mark.parametrize("is_profiler", [False, True])
def test_a_mode_whose_cost_is_not_known_is_named_all_the_same(is_profiler: bool) -> None:
    result = replace(profile(), slow_modes=("anomaly detection",))
    if is_profiler:
        result = replace(profile(), own_profiler=CALL)
    (advice,) = advise(result)
    assert advice.bottleneck == ("own_profiler" if is_profiler else "slow_modes")
    assert advice.text.startswith("steps before the profiled ones had a")
    assert advice.remedy.endswith("to see the cost, profile later steps (from 8 on)")
    assert advice.predicted_step_s == pytest.approx(0.1)
    assert "nothing worth changing" not in headline(result)


def test_settings_that_make_micro_batches_small_are_named() -> None:
    wasted = (WastedWork(kind="single_samples", part=0.8),)
    result = replace(profile(), wasted=wasted, phases_s=PHASES)
    assert first(result).remedy.endswith(
        "micro-batches (fewer --train.accumulate or --train.shards)"
    )
    assert first(as_script(result)).remedy.endswith("in larger micro-batches")
