"""What a tracker gets and must be able to do: numbers, images and text by step, under names that
stay the same.

A number of a `train` or `evaluation` event is called `train/NAME` or `evaluation/NAME`; what was
logged by hand keeps the name that it was given.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol

from drumline.base.errors import MissingExtraError
from drumline.metrics.logged import MEDIA
from drumline.runs.events import STAMP, Event, read_events

Outcome = Literal["finished", "preempted", "failed"]
RECORDED = ("train", "evaluation", "logged")
"""The kinds of events that trackers show."""


@dataclass(frozen=True)
class Record:
    """What one event adds to a tracker, by name."""

    step: int
    """How many optimizer steps were done."""

    time: float
    """In Unix seconds."""

    values: Mapping[str, float | Path | str]
    """A number, the file of an image, or text."""


class Tracker(Protocol):
    """One run in one tracker. All calls come from one thread, which is not the loop's; each may
    raise, or hang."""

    name: str
    keeps_past: bool
    """Whether it still has, after a kill, what was written before: else that is written again on a
    resume."""

    def open(self, run: str, *, resume_step: int) -> str:
        """Begin the tracker's run of this id, or continue it; where people find it. After a failure
        it is called again."""

    def has(self, name: str, step: int) -> bool:
        """Whether an earlier start of the run has written this already."""

    def write(self, records: Sequence[Record]) -> None:
        """Records in the order of their steps."""

    def close(self, outcome: Outcome) -> None: ...


def load_package(name: str, *, tracker: str) -> ModuleType:
    """The package of a tracker, which is an extra of the same name as the tracker."""
    try:
        with warnings.catch_warnings():
            # The user can do nothing about the warnings of a package's own imports.
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"--log.trackers {tracker}", extra=tracker) from error


def record_of(event: Event, folder: Path) -> Record:
    """The record of an event; empty if trackers do not show it. `folder`: the run's, which paths
    begin at."""
    values: dict[str, float | Path | str] = {}
    if event["kind"] in ("train", "evaluation"):
        for name, value in event.items():
            if name not in STAMP and isinstance(value, int | float):
                values[f"{event['kind']}/{name}"] = float(value)
    elif event["kind"] == "logged":
        values[event["name"]] = _logged_value(event, folder)

    return Record(event["step"], event["time"], values)


def _logged_value(event: Event, folder: Path) -> float | Path | str:
    """Of a `logged` event."""
    match event["type"]:
        case "scalar":
            return float(event["value"])
        case "image":
            # Of an event file that another wrote, no path leads out of the folder.
            return folder / MEDIA / Path(event["path"]).name
        case _:
            return str(event["value"])


def past_events(path: Path) -> Iterator[Event]:
    """What earlier starts of a run did, without what a later one repeats. The last start in the
    file is this one."""
    resumed_from: list[int] = []
    for event in read_events(path):
        if event["kind"] == "start":
            resumed_from.append(0)
        elif event["kind"] == "resume" and resumed_from:
            resumed_from[-1] = event["step"]

    # What a start did counts as far as every later one resumed from there or after it.
    limits = [-1, *accumulate(reversed(resumed_from[1:]), min)]
    limit = -1

    for event in read_events(path):
        if event["kind"] == "start":
            limit = limits.pop()
        elif event["kind"] in RECORDED and event["step"] <= limit:
            yield event
