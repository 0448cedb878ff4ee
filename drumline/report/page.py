"""Writes the page of one or several runs: one HTML file that needs no network, from page.html and
the data of the runs.

A run folder is untrusted. jinja2 escapes all that comes from it, control characters are shown as
escapes, and the Content-Security-Policy of the page lets only its own two scripts run, by their
hashes.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drumline.base.text import duration, file_size, plural, print_message, show_lines, shown
from drumline.base.untrusted import replace_text
from drumline.metrics.display import metric_text, number_text, speed
from drumline.report.curves import SCALING, SHARES, TRAINING, Curve, evenly, table_rows, thinned
from drumline.report.event_sample import number, text
from drumline.report.goodput import Goodput, RunClock, goodput_of
from drumline.report.heat_map import (
    MAX_ROWS,
    STEP_PHASES,
    HeatMap,
    level_of,
    make_heat_map,
    mean_phases,
)
from drumline.report.run_data import MAX_MOMENTS, RunData, read_run
from drumline.runs.profile_result import PART_NAMES

if TYPE_CHECKING:
    from jinja2 import Template

REPORT_FILE = "report.html"
MAX_TEXT = 1000
MAX_LABEL = 300
MAX_POINTS = 50_000
MAX_SERIES_POINTS = 1200
MAX_KINDS_IN_CHART = 2
"""Of several runs: training, and one evaluation set."""
STRIP_WIDTH = 1000
_HERE = Path(__file__).parent
_STYLES = ("vendor/uPlot.min.css", "page.css")
_SCRIPTS = ("vendor/uPlot.iife.min.js", "page.js")


@dataclass(frozen=True, kw_only=True)
class ChartView:
    """A chart with the curves of each run that has them."""

    title: str
    axis: str
    labels: list[str]
    rows: list[tuple[int, list[float | None]]]
    """Of a table of the same."""
    data: dict[str, Any]
    """For page.js."""
    num_points: int
    num_shown: int


@dataclass(frozen=True)
class StripMark:
    """Something on the strip of the timeline, in thousandths of its width."""

    kind: str
    x: float
    width: float
    label: str


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What the template shows of one run beside the charts."""

    run: RunData
    name: str
    goodput: Goodput
    clock: RunClock
    heat_map: HeatMap | None
    strip: list[StripMark]
    step_s: dict[str, float]
    """The mean of each phase over all ranks, in seconds a step."""


def write_report(runs: Sequence[Path], to: Path) -> Path:
    """Read the run folders and write the page; it replaces an earlier one when it is complete."""
    replace_text(to, render_page([read_run(path) for path in runs]))
    return to


def render_page(runs: Sequence[RunData], *, refresh_s: float | None = None) -> str:
    """`refresh_s`: the page loads itself again after so many seconds, while the run is training."""
    names = run_names(runs)
    views = [_view(run, name, num_runs=len(runs)) for run, name in zip(runs, names, strict=True)]
    charts = _charts(runs, names)
    by_set = metrics_by_set(runs[0])
    settings = [row for row in compare([run.settings for run in runs]) if row.differs]
    environment = [row for row in compare([run.environment for run in runs]) if row.differs]

    return _template().render(
        views=views,
        names=names,
        charts=charts,
        data=[chart.data for chart in charts],
        rows=compare([facts_of(view.run, view.goodput) for view in views]),
        metrics=compare([metric_texts(run) for run in runs]),
        metric_sets=list(by_set),
        metrics_of_sets=compare(list(by_set.values())),
        differing=settings + environment,
        profile_parts=PART_NAMES,
        made_at=time.time(),
        refresh_s=refresh_s,
    )


def _view(run: RunData, name: str, *, num_runs: int) -> RunView:
    """What the template shows of a run."""
    clock = RunClock(run.attempts)
    most_rows = max(4, min(MAX_ROWS, 3 * MAX_ROWS // num_runs))
    heat_map = None
    if len(run.phases) > 1:
        heat_map = make_heat_map(run.phases, run.hosts, clock, most_rows=most_rows)

    return RunView(
        run=run,
        name=name,
        goodput=goodput_of(run.attempts),
        clock=clock,
        heat_map=heat_map,
        strip=evenly(_strip(run, clock), 4 * MAX_MOMENTS),
        step_s=_mean_step(run),
    )


def _mean_step(run: RunData) -> dict[str, float]:
    """The mean of each phase over the ranks that report phases, in seconds a step."""
    means = [mean_phases(times) for times in run.phases.values()]
    means = [phases_s for phases_s in means if phases_s]
    totals = {phase: sum(phases_s.get(phase, 0.0) for phases_s in means) for phase in STEP_PHASES}
    return {phase: total / len(means) for phase, total in totals.items() if total > 0}


def _strip(run: RunData, clock: RunClock) -> list[StripMark]:
    """The starts and steps of each attempt, then what happened in them."""
    scale = STRIP_WIDTH / max(clock.seconds, 1e-9)
    marks = []
    for attempt in run.attempts:
        begin = clock.at(attempt.begin) * scale
        started = clock.at(attempt.started) * scale
        last = clock.at(attempt.last) * scale
        marks.append(StripMark("starting", begin, started - begin, "start"))
        marks.append(StripMark("steps", started, last - started, "training"))

    for moment in run.moments:
        if moment.kind not in ("start", "resume"):
            x = min(STRIP_WIDTH - 3, clock.at(moment.time) * scale)
            marks.append(StripMark(moment.kind, x, 3, moment.text[:200] or moment.kind))

    return marks


# One run, or several side by side: what was reached, how fast, and which settings differ


@dataclass(frozen=True)
class ComparedRow:
    """A fact with its value in each run; empty where a run does not have it."""

    label: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the runs have different values."""
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
    """The ranks, the batch, the model and the data, as text."""
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


# Charts


class DrawnCurve(NamedTuple):
    """A curve with its look, which is the same in every chart."""

    curve: Curve
    title: str
    """Of its chart."""
    label: str
    colour: int
    dash: int
    """A pattern of dashes; 0: none."""


def _charts(runs: Sequence[RunData], names: Sequence[str]) -> list[ChartView]:
    """A chart for each title, with the curves of all runs."""
    drawn = _curves_of_run(runs[0]) if len(runs) == 1 else _curves_of_runs(runs, names)
    most = min(MAX_SERIES_POINTS, MAX_POINTS // max(1, len(drawn)))
    by_title: dict[str, list[DrawnCurve]] = {}
    for drawn_curve in drawn:
        by_title.setdefault(drawn_curve.title, []).append(drawn_curve)
    return [_chart(title, curves, most) for title, curves in by_title.items()]


def _curves_of_run(run: RunData) -> list[DrawnCurve]:
    """Training and each evaluation set have a colour, in all charts the same."""
    labels = dict.fromkeys([TRAINING, *(curve.label for curve in run.curves)])
    places = {label: place for place, label in enumerate(labels)}

    return [
        DrawnCurve(
            curve,
            curve.chart,
            curve.label,
            colour=places[curve.label],
            dash=places[curve.label],
        )
        for curve in run.curves
    ]


def _curves_of_runs(runs: Sequence[RunData], names: Sequence[str]) -> list[DrawnCurve]:
    """Each run has a colour. With several evaluation sets a chart would have too many curves: each
    set has its own."""
    labels: dict[str, set[str]] = {}
    for run in runs:
        for curve in run.curves:
            labels.setdefault(curve.chart, set()).add(curve.label)

    drawn = []
    for colour, (run, name) in enumerate(zip(runs, names, strict=True)):
        for curve in run.curves:
            title = curve.chart
            label = f"{name} {curve.label}"
            if len(labels[curve.chart]) > MAX_KINDS_IN_CHART:
                title = f"{curve.chart}: {curve.label}"
                label = name
            drawn.append(
                DrawnCurve(
                    curve,
                    title=title,
                    label=label,
                    colour=colour,
                    dash=int(curve.label != TRAINING),
                )
            )

    charts = list(dict.fromkeys(drawn_curve.curve.chart for drawn_curve in drawn))
    return sorted(drawn, key=lambda drawn_curve: charts.index(drawn_curve.curve.chart))


def _chart(title: str, drawn: Sequence[DrawnCurve], most: int) -> ChartView:
    """One chart, with the table of its values."""
    curves = [drawn_curve.curve for drawn_curve in drawn]
    metric = curves[0].chart
    axis = "ranks" if metric == SCALING else "step"
    series = [
        _series(drawn_curve, shown(drawn_curve.label)[:MAX_LABEL], most) for drawn_curve in drawn
    ]
    is_share = metric in SHARES or metric.endswith("accuracy")

    return ChartView(
        title=title,
        axis=axis,
        labels=[drawn_curve.label for drawn_curve in drawn],
        rows=table_rows(curves),
        data={"axis": axis, "percent": is_share, "series": series},
        num_points=sum(len(curve.steps) for curve in curves),
        num_shown=sum(len(points["x"]) for points in series),
    )


def _series(drawn: DrawnCurve, label: str, most: int) -> dict[str, Any]:
    """One curve, as page.js draws it."""
    points = thinned(drawn.curve.steps, drawn.curve.values, most)

    return {
        "label": label,
        "colour": drawn.colour,
        "dash": drawn.dash,
        "x": [step for step, _ in points],
        "y": [None if value is None else float(f"{value:.6g}") for _, value in points],
    }


# The template


@cache
def _template() -> Template:
    """The template with its filters, styles, scripts and policy."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Of text alone: what the template itself makes is markup.
        finalize=lambda value: shown(value[:MAX_TEXT]) if type(value) is str else value,
    )
    environment.filters |= {
        "duration": duration,
        "size": file_size,
        "plural": plural,
        "number": lambda value: "" if value is None else number_text(value),
        "ms": lambda seconds: f"{seconds * 1000:,.{1 if seconds < 0.1 else 0}f} ms",
        "percent": lambda share: f"{share:.1%}",
        "level": level_of,
        "clock": lambda moment: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)),
    }
    styles = [(_HERE / name).read_text(encoding="utf-8") for name in _STYLES]
    scripts = [(_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    policy = {
        "default-src": ["'none'"],
        "script-src": map(_hash, scripts),
        "style-src": map(_hash, styles),
    }
    rules = "; ".join(f"{name} {' '.join(values)}" for name, values in policy.items())
    environment.globals |= {
        "styles": list(map(Markup, styles)),  # files of this package
        "scripts": list(map(Markup, scripts)),
        "policy": f"{rules}; base-uri 'none'; form-action 'none'",
    }
    return environment.get_template("page.html")


def _hash(content: str) -> str:
    """As the Content-Security-Policy names a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def report_at_end(folder: Path, *, prints: bool = True) -> None:
    """Write RUN/report.html after training. Never fails a run: an error is a warning."""
    try:
        if folder.is_dir():
            written = write_report([folder], folder / REPORT_FILE)
            if prints:
                show_lines([f"report: {written}"])
    except OSError as error:
        print_message(f"warning: {folder / REPORT_FILE} could not be written: {error.strerror}")
    except Exception as error:
        print_message(f"warning: the report could not be written: {type(error).__name__}: {error}")
