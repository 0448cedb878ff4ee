"""Trials of advice: changed and unchanged runs take turns, and what a change brought is compared
with the forecast."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from drumline.report.profile.bottleneck import Advice, Savings
from drumline.tools.profile import advice_trial
from drumline.tools.profile.advice_trial import AdviceTrial, ShortRuns, trial_lines, try_advice
from drumline.tools.prove.killed_run import Leg, RunFailedError


def advice(
    settings: Mapping[str, str] | None, saved_s: tuple[float, float, float] = (0.04, 0.05, 0.03)
) -> Advice:
    return Advice(
        bottleneck="data",
        text="",
        settings=settings,
        cost_s=0.06,
        step_s=0.1,
        saved_s=Savings(*saved_s),
        derivation="",
    )


class RecordedRuns(ShortRuns):
    """Runs whose steps are known: twice as fast with a change."""

    def step_seconds(self, settings: Mapping[str, str]) -> float:
        order.append(dict(settings))
        if "train.precision" in settings:
            raise RunFailedError("the run failed by itself with exit code 1")
        return 0.08 / (2 if settings else 1)


order: list[dict[str, str]] = []


def test_changed_and_unchanged_runs_take_turns() -> None:
    order.clear()
    workers = {"data.workers": "4"}
    precision = {"train.precision": "bf16"}
    runs = RecordedRuns(arguments=list, procs=2, folder=Path(), step_s=0.1, batch_size=8)
    notes: list[str] = []
    trials = try_advice(
        [advice(workers), advice(None), advice(precision)], runs, note=notes.append, rounds=2
    )
    assert order == [{}, workers, precision, {}, workers], "what has failed is not run again"
    assert notes == ["round 1 of 2: 3 short runs", "round 2 of 2: 3 short runs"]
    assert [(trial.before_s, trial.after_s) for trial in trials] == [
        ([0.08, 0.08], [0.04, 0.04]),
        ([], []),
    ]
    assert list(trial_lines(trials)) == [
        "--data.workers 4: 80 ms -> 40 ms a step: -50% (-50% to -50% in 2 runs); predicted -40% (-50% to -30%): "
        "as predicted",
        "--train.precision bf16: the run failed by itself with exit code 1",
    ]
    assert trials[0].document()["ratio"] == 0.5
    assert trials[1].document()["failure"] == "the run failed by itself with exit code 1"


def test_what_was_measured_is_kept_when_the_unchanged_job_fails_later() -> None:
    class FailingRuns(RecordedRuns):
        def step_seconds(self, settings: Mapping[str, str]) -> float:
            if not settings and len(order) >= failing_from:
                raise RunFailedError("the run with unchanged settings failed")
            return super().step_seconds(settings)

    runs = FailingRuns(arguments=list, procs=2, folder=Path(), step_s=0.1, batch_size=8)
    order.clear()
    failing_from = 1
    notes = list[str]()
    (trial,) = try_advice([advice({"data.workers": "4"})], runs, note=notes.append)
    assert (trial.before_s, trial.after_s, trial.failure) == ([0.08], [0.04], None)
    assert notes[-1] == "the run with unchanged settings failed: the results are of 1 round"
    order.clear()
    failing_from = 0
    with pytest.raises(RunFailedError):
        try_advice([advice({"data.workers": "4"})], runs, note=notes.append)


def test_a_run_begins_without_the_folder_of_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(leg: Leg) -> None:
        assert not leg.folder.exists()
        leg.folder.mkdir()
        raise RunFailedError("the run failed")

    monkeypatch.setattr(advice_trial, "run_to_the_end", fail)
    (tmp_path / "run").mkdir()  # of a killed `drumline profile`
    runs = ShortRuns(arguments=list, procs=2, folder=tmp_path, step_s=0.1, batch_size=8)
    with pytest.raises(RunFailedError):
        runs.step_seconds({})
    assert not (tmp_path / "run").exists()


def test_without_a_setting_to_try_nothing_is_run() -> None:
    order.clear()
    runs = RecordedRuns(arguments=list, procs=2, folder=Path(), step_s=0.1, batch_size=8)
    assert try_advice([advice(None)], runs, note=pytest.fail) == []
    assert order == []


@pytest.mark.parametrize(
    ("after_s", "verdict"),
    [(0.045, "more than predicted"), (0.06, "as predicted"), (0.08, "less than predicted")],
)
def test_a_result_outside_of_the_band_is_reported_as_such(after_s: float, verdict: str) -> None:
    trial = AdviceTrial(
        advice=advice({"data.workers": "4"}), before_s=[0.1, 0.11, 0.09], after_s=[after_s] * 3
    )
    (line,) = trial_lines([trial])
    assert line.endswith(verdict)
    assert trial.spread == (pytest.approx(after_s / 0.11), pytest.approx(after_s / 0.09))
