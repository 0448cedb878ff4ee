"""One run, or several side by side: what was reached, how fast, and which settings differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drumline.base.text import duration, plural
from drumline.metrics.display import metric_text, number_text, speed
from drumline.report.event_sample import number, text
from drumline.report.goodput import Goodput
from drumline.report.run_data import RunData


@dataclass(frozen=True)
class ComparedRow:
    """A fact with its value in each run; empty where a run does not have it."""

    label: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def run_names(runs: Sequence[RunData]) -> list[str]:
    """The names of the folders, or their paths where two have the same name."""
    names = [run.path.resolve().name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.path)
        for run, name in zip(runs, names, strict=True)
    ]


def compare(of_runs: Sequence[Mapping[str, str]]) -> list[ComparedRow]:
    """A row for each name, in the order of the runs."""
    names = dict.fromkeys(name for facts in of_runs for name in facts)
    return [ComparedRow(name, tuple(facts.get(name, "") for facts in of_runs)) for name in names]


def facts_of(run: RunData, goodput: Goodput) -> dict[str, str]:
    """What a reader asks first, as text, without the metrics."""
    total = run.facts.get("total_steps")
    facts = {"task": run.facts.get("task", ""), "state": run.state}
    facts["steps"] = f"{run.step:,}" + (f" of {total:,}" if total else "")
    best = run.end.get("best_step")
    if type(best) is int:
        facts["best checkpoint"] = f"step {best:,}"
    facts |= _speeds(run)
    if not run.is_own_loop:
        facts["time"] = duration(goodput.total_s)
        facts["goodput"] = f"{goodput.share:.1%}"
        facts["restarts"] = str(run.num_restarts)
        facts["saves"] = f"{run.num_saves:,}"
    stopped = text(run.end.get("stopped"))[:200]
    if stopped and run.state == "done":
        facts["stopped"] = stopped
    return facts | _job_facts(run)


def metric_texts(run: RunData) -> dict[str, str]:
    """The metrics of the latest evaluation, by name."""
    return {name: metric_text(name, value) for name, value in run.metrics.items()}


def metrics_by_set(run: RunData) -> dict[str, dict[str, str]]:
    """The same by evaluation set: a metric of one of several sets is called `SET/METRIC`."""
    by_set: dict[str, dict[str, str]] = {}
    for name, value in metric_texts(run).items():
        evaluation_set, _, metric = name.rpartition("/")
        by_set.setdefault(evaluation_set, {})[metric] = value
    return by_set


def _speeds(run: RunData) -> dict[str, str]:
    """Of the end, or of the last log line of a run that has none."""
    last = {
        curve.chart: value for curve in run.curves for value in curve.values if value is not None
    }
    facts = {}
    if samples := number(run.end.get("samples_per_s")) or last.get("samples/s"):
        facts["speed"] = speed(samples)
    for name, chart in (("tokens_per_s", "tokens/s"), ("tflop_per_s", "TFLOP/s"), ("mfu", "MFU")):
        if value := number(run.end.get(name)) or last.get(chart):
            facts[chart] = f"{value:.1%}" if name == "mfu" else number_text(value)
    return facts


def _job_facts(run: RunData) -> dict[str, str]:
    job = run.facts
    facts = {}
    if "world_size" in job:
        place = ", ".join(filter(None, (job.get("device"), job.get("backend"))))
        facts["ranks"] = f"{job['world_size']:,} ({place})"
    for name, label in (("batch_size", "batch"), ("model_parameters", "parameters")):
        if name in job:
            facts[label] = f"{job[name]:,}"
    if "train_samples" in job:
        facts["data"] = plural(job["train_samples"], "sample")
    if "precision" in job:
        facts["precision"] = job["precision"]
    return facts
