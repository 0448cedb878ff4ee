"""`drumline profile --try`: short runs of the same job, with the changes that advice proposes and
without them in turn, and what each change brought against what was predicted. No profiler, no
torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from drumline.base.text import latency, plural
from drumline.report.profile.bottleneck import Advice, flags_of
from drumline.runs.events import read_events
from drumline.runs.run_folder import RunFolder
from drumline.tools.prove.killed_run import Leg, RunFailedError, run_to_the_end

ROUNDS = 3
LAPS = 3
LAP_S = 1.0
LAP_STEPS = range(4, 51)
"""A run has a lap to warm up and three that are timed, of about a second each."""
QUIET: Mapping[str, Any] = {
    "optim.warmup_steps": 0,
    "watch.sidecar": "off",
    "log.display": "none",
}
"""Settings of profiles and short runs."""
NO_PAUSES: Mapping[str, Any] = {
    "train.eval_every_epochs": 0,
    "train.eval_every_steps": 0,
    "checkpoint.every_epochs": 0,
    "checkpoint.every_steps": 0,
}
"""Those of short runs of a job whose profile has no evaluations and saves."""
LOG_EVERY = "log.every_steps"


@dataclass(frozen=True, kw_only=True)
class ShortRuns:
    """How to run the job for some steps."""

    arguments: Callable[[Mapping[str, Any]], Sequence[str]]
    """What follows `drumline train`, with these settings changed."""
    procs: int
    folder: Path
    """Of the runs, each of which is removed after it."""
    step_s: float
    batch_size: int
    log_every: int = LAP_STEPS[-1]
    """How many steps the job takes from one log line to the next."""
    has_pauses: bool = False
    """Whether its evaluations and saves are a part of what is measured."""

    def step_seconds(self, settings: Mapping[str, str]) -> float:
        """A step with these settings, for as many samples as in the unchanged job: the median of the laps, or
        with evaluations and saves their mean.

        A change of accumulation has more samples a step, and is compared by its samples a second."""
        steps_of_lap = round(LAP_S / self.step_s)
        lap = min(max(steps_of_lap, LAP_STEPS[0]), LAP_STEPS[-1])
        length = {
            "train.steps": (1 + LAPS) * lap,
            LOG_EVERY: min(lap, int(settings.get(LOG_EVERY, self.log_every))),
        }
        quiet = QUIET if self.has_pauses else {**QUIET, **NO_PAUSES}
        events = self._train_events(settings, {**quiet, **settings, **length})

        first = next(event for event in events if event["step"] >= lap)
        timed = [event for event in events if event["step"] > first["step"]]
        # which has more samples a step
        if not self.has_pauses or "train.accumulate" in settings:
            return median(self.batch_size / float(event["samples_per_s"]) for event in timed)

        num_steps = int(timed[-1]["step"] - first["step"])
        return float(timed[-1]["time"] - first["time"]) / num_steps

    def _train_events(
        self, tried: Mapping[str, str], settings: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Run the job, and read its log lines. `tried`: the settings that name the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        run = self.folder / "run"
        log = self.folder / "output.txt"
        name = f"the run with {flags_of(tried) or 'unchanged settings'}"
        # of a `drumline profile` that was killed
        shutil.rmtree(run, ignore_errors=True)

        try:
            arguments = tuple(self.arguments(settings))
            run_to_the_end(Leg(name, arguments, run, log, self.procs))
            events = read_events(RunFolder(run).event_file(0))

            return [event for event in events if event["kind"] == "train"]
        finally:
            shutil.rmtree(run, ignore_errors=True)


@dataclass(kw_only=True)
class AdviceTrial:
    """What a change brought. A prediction is compared as a fraction of the step, since the profiled
    step has the profiler's own time in it."""

    advice: Advice
    before_s: list[float] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)
    """The steps of the runs, which alternate: unchanged, and changed."""
    failure: str | None = None
    """Why the changed job could not be run."""

    @property
    def predicted(self) -> float:
        """The step that was predicted, as a fraction of the unchanged one."""
        return self.advice.predicted_step_s / self.advice.step_s

    @property
    def band(self) -> tuple[float, float]:
        """The smallest and the largest fraction that the prediction allows."""
        low, high = self.advice.band
        return low / self.advice.step_s, high / self.advice.step_s

    @property
    def ratio(self) -> float:
        """The changed step as a fraction of the unchanged one: medians of their runs."""
        return median(self.after_s) / median(self.before_s)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest ratio of two runs, one after the other."""
        pairs = zip(self.before_s, self.after_s, strict=True)
        ratios = [after / before for before, after in pairs]
        return min(ratios), max(ratios)

    def document(self) -> dict[str, Any]:
        """For --json.

        {'settings': {'data.workers': '4'}, 'predicted': 0.6, 'ratio': 0.63, 'spread': [0.61, 0.65], ...}
        """
        document = {
            "bottleneck": self.advice.bottleneck,
            "settings": self.advice.settings,
            "predicted": self.predicted,
            "band": self.band,
            "before_s": self.before_s,
            "after_s": self.after_s,
            "failure": self.failure,
        }
        if not self.failure:
            document |= {"ratio": self.ratio, "spread": self.spread}

        return document


def try_advice(
    proposals: Sequence[Advice],
    runs: ShortRuns,
    *,
    note: Callable[[str], None],
    rounds: int = ROUNDS,
) -> list[AdviceTrial]:
    """Run each change that a setting makes, and what each brought.

    In each round the unchanged job is first, then each changed one. When the unchanged job fails
    after the first round, the results of the rounds before remain."""
    trials = [AdviceTrial(advice=advice) for advice in proposals if advice.settings]
    for number in range(rounds if trials else 0):
        note(f"round {number + 1} of {rounds}: {plural(1 + len(trials), 'short run')}")
        try:
            before_s = runs.step_seconds({})
        except RunFailedError as error:
            if number == 0:
                raise

            note(f"{error.what}: the results are of {plural(number, 'round')}")
            break

        for trial in (candidate for candidate in trials if candidate.failure is None):
            try:
                after_s = runs.step_seconds(trial.advice.settings or {})
            except RunFailedError as error:
                trial.failure = error.what
            else:
                trial.before_s.append(before_s)
                trial.after_s.append(after_s)

    return trials


def trial_lines(trials: Sequence[AdviceTrial]) -> Iterator[str]:
    """What each change brought, in a line:

    --data.workers 4: 41 ms -> 26 ms a step: -37% (-39% to -35% in 3 runs); predicted -40%
    (-50% to -30%): as predicted
    """
    for trial in trials:
        flags = flags_of(trial.advice.settings or {})
        if trial.failure is not None:
            yield f"{flags}: {trial.failure}"
            continue

        before = median(trial.before_s)
        after = median(trial.after_s)
        low, high = trial.spread
        shortest, longest = trial.band

        outcome = "as predicted"
        if trial.ratio < shortest:
            outcome = "more than predicted"
        elif trial.ratio > longest:
            outcome = "less than predicted"

        expected = f"{_change(trial.predicted)} ({_change(shortest)} to {_change(longest)})"
        yield (
            f"{flags}: {latency(before)} -> {latency(after)} a step: {_change(trial.ratio)} ({_change(low)} to "
            f"{_change(high)} in {plural(len(trial.after_s), 'run')}); predicted {expected}: {outcome}"
        )


def _change(ratio: float) -> str:
    """`-38%`."""
    return f"{ratio - 1:+.0%}"
