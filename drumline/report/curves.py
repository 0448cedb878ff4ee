"""The curves of a run: values by step, without what a restart repeats, and as few points as a
screen can show."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from drumline.report.event_sample import number
from drumline.runs.events import STAMP

T = TypeVar("T")
TABLE_ROWS = 12
UNITS = {
    "lr": "learning rate",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "tflop_per_s": "TFLOP/s",
    "mfu": "MFU",
    "data_share": "waiting for data",
    "communication_share": "exposed communication",
}
"""The engine's own numbers in a `train` event, in the order in which they are shown, after the
task's."""
SCALING = "scaling efficiency"
TRAINING = "training"
"""The label of the curves that are not of an evaluation."""
SHARES = ("MFU", "waiting for data", "exposed communication", SCALING)
"""Those that are fractions of 1."""
_NOT_SHOWN = STAMP | {"epoch", "samples", "seconds", "seconds_left"}


@dataclass
class Curve:
    """Values by step; None where the value is not finite."""

    chart: str
    """The title of the chart that it belongs to."""
    label: str
    steps: list[int] = field(default_factory=list)
    """In ascending order."""
    values: list[float | None] = field(default_factory=list)

    def cut(self, step: int) -> None:
        """Drop what came after this step: a restart repeats it."""
        num_points = bisect_right(self.steps, step)
        del self.steps[num_points:]
        del self.values[num_points:]

    def value_at(self, step: int) -> float | None:
        """The value at a step, or the last one before it; None: none is before it."""
        place = bisect_right(self.steps, step) - 1
        return self.values[place] if place >= 0 else None


class Curves:
    """Collects the numbers of `train`, `evaluation` and `logged` events."""

    def __init__(self) -> None:
        self._curves: dict[tuple[str, str], Curve] = {}
        """By chart and label."""

    def add(self, event: Mapping[str, Any]) -> None:
        """Take the numbers of one event."""
        step = event["step"]
        if event["kind"] == "logged":
            name = event.get("name")
            if event.get("type") == "scalar" and isinstance(name, str):
                self._put(name, "logged", step, event.get("value"))
            return

        is_training = event["kind"] == "train"
        for name, value in event.items():
            is_number = type(value) in (int, float) or value in ("nan", "inf", "-inf")
            if name in _NOT_SHOWN or not is_number:
                continue

            if is_training:
                metric = name
                label = TRAINING
            else:
                dataset, _, metric = name.rpartition("/")
                label = f"evaluation {dataset}".rstrip()
            self._put(UNITS.get(metric, metric), label, step, value)

    def _put(self, chart: str, label: str, step: int, value: Any) -> None:
        """Append a value to a curve; it replaces those from its step on."""
        curve = self._curves.setdefault((chart, label), Curve(chart, label))
        curve.cut(step - 1)  # a start without a checkpoint repeats all
        curve.steps.append(step)
        curve.values.append(number(value))

    def cut(self, step: int) -> None:
        """Drop what came after this step from all curves."""
        for curve in self._curves.values():
            curve.cut(step)

    def in_order(self) -> list[Curve]:
        """The loss first, then the task's other numbers, then the engine's."""
        task_charts = [chart for chart, _ in self._curves if chart not in UNITS.values()]
        charts = list(dict.fromkeys(["loss", *task_charts, *UNITS.values()]))

        curves = []
        for curve in self._curves.values():
            if any(value is not None for value in curve.values):
                curves.append(curve)

        return sorted(
            curves,
            key=lambda curve: (charts.index(curve.chart), curve.label != TRAINING),
        )


def thinned(
    steps: Sequence[int],
    values: Sequence[float | None],
    most: int,
) -> list[tuple[int, float | None]]:
    """At most this many points: the first, the last, and the lowest and highest of each bucket, so
    that no peak is lost. A value that is not finite stays in its bucket as a gap."""
    points = list(zip(steps, values, strict=True))
    if len(points) <= most:
        return points

    num_buckets = max(1, (most - 2) // 3)
    edges = [bucket * len(points) // num_buckets for bucket in range(num_buckets + 1)]
    shown_places = {0, len(points) - 1}
    for low, high in pairwise(edges):
        finite: list[tuple[float, int]] = []
        gaps: list[int] = []
        for place in range(low, high):
            value = values[place]
            if value is None:
                gaps.append(place)
            else:
                finite.append((value, place))

        if finite:
            _, lowest_place = min(finite)
            _, highest_place = max(finite)
            shown_places |= {lowest_place, highest_place}
        shown_places.update(gaps[:1])

    return [points[place] for place in sorted(shown_places)]


def evenly(items: Sequence[T], most: int) -> list[T]:
    """All items, or this many (2 or more) at equal distances, with the first and the last."""
    if len(items) <= most:
        return list(items)

    last = len(items) - 1
    return [items[number * last // (most - 1)] for number in range(most)]


def table_rows(curves: Sequence[Curve]) -> list[tuple[int, list[float | None]]]:
    """A few steps with the value of each curve at that step, or the last one before it."""
    steps = sorted({step for curve in curves for step in curve.steps})
    return [
        (step, [curve.value_at(step) for curve in curves]) for step in evenly(steps, TABLE_ROWS)
    ]
