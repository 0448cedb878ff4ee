"""Writes the page of one or several runs: one HTML file that needs no network, from page.html and the data of the runs.

A run folder is untrusted. jinja2 escapes all that comes from it, control characters are shown as escapes, and the
Content-Security-Policy of the page lets only its own two scripts run, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.metrics.display import number_text
from drumline.report.comparison import ComparedRow, compare, facts_of, run_names
from drumline.report.curves import SCALING, SHARES, Curve, table_rows, thinned
from drumline.report.goodput import Goodput, RunClock, goodput_of
from drumline.report.heat_map import MAX_ROWS, STEP_PHASES, HeatMap, level_of, make_heat_map, mean_phases
from drumline.report.run_data import RunData, read_run
from drumline.scale.profile_result import PART_NAMES
from drumline.terminal import shown
from drumline.text import duration, file_size, plural
from drumline.untrusted import replace_text

if TYPE_CHECKING:
    from jinja2 import Template

MAX_BYTES = 3_000_000
MAX_POINTS, MAX_SERIES_POINTS = 50_000, 1200
STRIP_WIDTH = 1000
_HERE = Path(__file__).parent
_STYLES, _SCRIPTS = ("vendor/uPlot.min.css", "page.css"), ("vendor/uPlot.iife.min.js", "page.js")


@dataclass(frozen=True)
class ChartCurve:
    curve: Curve
    label: str
    colour: int


@dataclass(frozen=True)
class ChartView:
    """A chart with the curves of each run that has them."""

    title: str
    curves: list[ChartCurve]

    @property
    def axis(self) -> str:
        return "ranks" if self.title == SCALING else "step"

    def rows(self) -> list[tuple[int, list[float | None]]]:
        """A table of the same."""
        return table_rows([one.curve for one in self.curves])


@dataclass(frozen=True)
class StripMark:
    """Something on the strip of the timeline, in thousandths of its width."""

    kind: str
    x: float
    width: float
    label: str


@dataclass(frozen=True)
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
    most_rows = max(4, min(MAX_ROWS, 3 * MAX_ROWS // len(runs)))
    views = [_view(run, name, most_rows) for run, name in zip(runs, names, strict=True)]
    charts = _charts(runs, names)
    rows = compare([facts_of(view.run, view.goodput) for view in views])
    most = min(MAX_SERIES_POINTS, MAX_POINTS // max(1, sum(len(chart.curves) for chart in charts)))
    return _template().render(
        views=views,
        names=names,
        charts=charts,
        data=[_chart_data(chart, most) for chart in charts],
        rows=rows,
        settings=_differing([run.settings for run in runs]),
        environment=_differing([run.environment for run in runs]),
        profile_parts=PART_NAMES,
        made_at=time.time(),
        refresh_s=refresh_s,
    )


def _differing(of_runs: Sequence[dict[str, str]]) -> list[ComparedRow]:
    return [row for row in compare(of_runs) if row.differs]


def _view(run: RunData, name: str, most_rows: int) -> RunView:
    clock = RunClock(run.attempts)
    of_ranks = [mean_phases(times) for times in run.phases.values()]
    known = [one for one in of_ranks if one]
    step_s = {phase: sum(one.get(phase, 0.0) for one in known) / len(known) for phase in STEP_PHASES if known}
    return RunView(
        run=run,
        name=name,
        goodput=goodput_of(run.attempts),
        clock=clock,
        heat_map=make_heat_map(run.phases, run.hosts, clock, most_rows=most_rows) if len(run.phases) > 1 else None,
        strip=_strip(run, clock),
        step_s={phase: seconds for phase, seconds in step_s.items() if seconds > 0},
    )


def _strip(run: RunData, clock: RunClock) -> list[StripMark]:
    """The starts and steps of each attempt, then what happened in them."""
    scale = STRIP_WIDTH / max(clock.seconds, 1e-9)
    marks = []
    for attempt in run.attempts:
        edges = [attempt.begin, attempt.last if attempt.first_step_at is None else attempt.first_step_at, attempt.last]
        begin, first, last = (clock.at(edge) * scale for edge in edges)
        marks.append(StripMark("starting", begin, first - begin, "start"))
        marks.append(StripMark("steps", first, last - first, "training"))
    for moment in run.moments:
        if moment.kind not in ("start", "resume"):
            x = min(STRIP_WIDTH - 3, clock.at(moment.time) * scale)
            marks.append(StripMark(moment.kind, x, 3, moment.text[:200] or moment.kind))
    return marks


# Charts


def _charts(runs: Sequence[RunData], names: Sequence[str]) -> list[ChartView]:
    """Of several runs, each has a colour; of one run, each of its curves in a chart."""
    found: dict[str, list[ChartCurve]] = {}
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        for curve in run.curves:
            chart = found.setdefault(curve.chart, [])
            if len(runs) == 1:
                chart.append(ChartCurve(curve, curve.label, len(chart)))
            else:
                chart.append(ChartCurve(curve, f"{name} {curve.label}", number))
    return [ChartView(title, curves) for title, curves in found.items()]


def _chart_data(chart: ChartView, most: int) -> dict[str, Any]:
    series = []
    for one in chart.curves:
        points = thinned(one.curve.steps, one.curve.values, most)
        values = [None if value is None else float(f"{value:.6g}") for _, value in points]
        style = {"colour": one.colour, "dashed": one.curve.label != "training"}
        series.append({"label": shown(one.label)[:300], **style, "x": [step for step, _ in points], "y": values})
    is_share = chart.title in SHARES or chart.title.endswith("accuracy")
    return {"axis": chart.axis, "percent": is_share, "series": series}


# The template


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Of text alone: what the template itself makes is markup.
        finalize=lambda value: shown(value) if type(value) is str else value,
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
    styles, scripts = ([(_HERE / name).read_text(encoding="utf-8") for name in names] for names in (_STYLES, _SCRIPTS))
    policy = {"default-src": ["'none'"], "script-src": map(_hash, scripts), "style-src": map(_hash, styles)}
    environment.globals |= {
        "styles": list(map(Markup, styles)),  # files of this package
        "scripts": list(map(Markup, scripts)),
        "policy": "; ".join(f"{name} {' '.join(values)}" for name, values in policy.items())
        + "; base-uri 'none'; form-action 'none'",
    }
    return environment.get_template("page.html")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
