"""The curves of a run: values by step, without what a restart repeats, and as few points as a
screen can show."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    label: str
    steps: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def cut(self, step: int) -> None:
        """Drop what came after this step: a restart repeats it."""
        keep = bisect_right(self.steps, step)
        del self.steps[keep:], self.values[keep:]


class Curves:
    """Collects the numbers of `train`, `evaluation` and `logged` events."""

    def __init__(self) -> None:
        self._curves: dict[tuple[str, str], Curve] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Take the numbers of one event."""
        step = event["step"]
        if event["kind"] == "logged":
            if event.get("type") == "scalar" and isinstance(event.get("name"), str):
                self._put(event["name"], "logged", step, event.get("value"))
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
        chart_order = [
            "loss",
            *(name for name, _ in self._curves if name not in UNITS.values()),
            *UNITS.values(),
        ]
        place = {name: order for order, name in reversed(list(enumerate(chart_order)))}
        curves = (
            curve
            for curve in self._curves.values()
            if any(value is not None for value in curve.values)
        )
        return sorted(curves, key=lambda curve: (place[curve.chart], curve.label != TRAINING))


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
    shown_places = {0, len(points) - 1}
    for bucket in range(num_buckets):
        low, high = (edge * len(points) // num_buckets for edge in (bucket, bucket + 1))
        finite = [
            (value, place) for place, value in enumerate(values[low:high], low) if value is not None
        ]
        if finite:
            shown_places |= {min(finite)[1], max(finite)[1]}
        if len(finite) < high - low:
            shown_places.add(next(place for place in range(low, high) if values[place] is None))

    return [points[place] for place in sorted(shown_places)]


def evenly(items: Sequence[T], most: int) -> list[T]:
    """All items, or this many (2 or more) at equal distances, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[place * (len(items) - 1) // (most - 1)] for place in range(most)]


def table_rows(
    curves: Sequence[Curve], most: int = TABLE_ROWS
) -> list[tuple[int, list[float | None]]]:
    """A few steps with the value of each curve at that step, or the last one before it."""
    steps = sorted({step for curve in curves for step in curve.steps})

    def value_at(curve: Curve, step: int) -> float | None:
        """The value at a step, or the last one before it."""
        place = bisect_right(curve.steps, step) - 1
        return curve.values[place] if place >= 0 else None

    return [(step, [value_at(curve, step) for curve in curves]) for step in evenly(steps, most)]
