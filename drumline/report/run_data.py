"""What a run folder holds, as typed data for the page. No torch.

Its files may be incomplete, damaged or hostile: what is not of its type is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from drumline.base.errors import UsageError
from drumline.base.text import number_ranges
from drumline.base.untrusted import read_record, read_toml
from drumline.metrics.display import event_line, metrics_of
from drumline.report.curves import SCALING, Curve, Curves, evenly
from drumline.report.event_sample import (
    MAX_SECONDS,
    MAX_STEP,
    number,
    rank_files,
    sampled_events,
    seconds_of,
    text,
    unix_time,
)
from drumline.report.goodput import AttemptTimes
from drumline.report.heat_map import PhaseTimes
from drumline.report.profile.advice import advise
from drumline.report.profile.bottleneck import advice_lines
from drumline.report.profile.profile_words import headline
from drumline.report.run_list import OWN_LOOP, FolderState, folder_state, newest_step
from drumline.report.scaling_plot import Line, efficiency_lines
from drumline.runs.profile_result import ProfileResult, read_profile
from drumline.runs.run_folder import RunFolder
from drumline.runs.scaling_result import Measurement, Prediction, read_scaling
from drumline.watch.diagnosis.diagnosis_files import read_diagnoses
from drumline.watch.heartbeat import Phase
from drumline.watch.run_status import RunStatusReader

MAX_RANKS = 4096
RANK_0_BYTES = 64 << 20
OTHER_BYTES = 16 << 20
"""How much is read of rank 0's events, and of those of all other ranks together."""
MAX_MOMENTS = 400
MAX_SETTINGS = 500
_PHASES = {phase.name.lower() for phase in Phase}
_SHOWN = (
    "start",
    "resume",
    "recovered",
    "checkpoint",
    "straggler",
    "stall",
    "preempted",
    "error",
    "end",
)
_FACTS: dict[str, type] = {
    "task": str,
    "device": str,
    "backend": str,
    "precision": str,
    "world_size": int,
    "model_parameters": int,
    "batch_size": int,
    "total_steps": int,
    "train_samples": int,
}


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Something on the timeline."""

    time: float
    kind: str
    """Of the event, or `fault` for a diagnosis."""
    step: int | None
    text: str


@dataclass(kw_only=True)
class RunData:
    """Everything that the page shows of one run."""

    path: Path
    state: FolderState
    message: str
    """How it ended, or why its state is not known."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the latest `start` event: see _FACTS."""
    end: dict[str, Any] = field(default_factory=dict)
    """The `end` event, if the run is done."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest evaluation's."""
    step: int = 0
    """The last one that it took."""
    attempts: list[AttemptTimes] = field(default_factory=list)
    """Its starts, with those of the launcher after a failure."""
    num_bytes: int = 0
    """Of rank 0's events; not all of a large file is read."""
    num_bytes_read: int = 0
    curves: list[Curve] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    num_saves: int = 0
    num_moments: int = 0
    """All but saves; `moments` has some of them, if there are many."""
    phases: dict[int, list[PhaseTimes]] = field(default_factory=dict)
    """By rank."""
    hosts: dict[int, str] = field(default_factory=dict)
    """By rank."""
    environment: dict[str, str] = field(default_factory=dict)
    """The command, the versions, and the ranks of each device, as text."""
    settings: dict[str, str] = field(default_factory=dict)
    """Of config.toml, as `SECTION.NAME`."""
    profile: ProfileResult | None = None
    profile_headline: str = ""
    profile_advice: list[str] = field(default_factory=list)

    @property
    def is_own_loop(self) -> bool:
        """Whether it has checkpoints, and no events: a loop of the user's own."""
        return self.state == OWN_LOOP

    @property
    def num_restarts(self) -> int:
        """How often the launcher started it again."""
        return sum(attempt.is_restart for attempt in self.attempts)


def read_run(path: Path) -> RunData:
    """Read a run folder; it may be incomplete, or being written."""
    folder = RunFolder(path)
    status = RunStatusReader(path).read()
    run = RunData(path=path, state=status.state, message=status.message() or "")
    files = dict(list(rank_files(folder.events).items())[:MAX_RANKS])
    if 0 in files:
        _add_rank_0(run, files.pop(0))
    if not run.attempts and folder_state(folder, has_events=False) == OWN_LOOP:
        run.state = OWN_LOOP
        run.step = newest_step(folder)

    most_bytes = max(1 << 16, OTHER_BYTES // (len(files) + 1))
    for rank, file in files.items():
        for event in sampled_events(file, most_bytes=most_bytes, kind="phases"):
            _add_phases(run, rank, event)

    _add_environment(run, folder.environment_file)
    run.settings = _read_settings(folder.config_file)
    _add_faults(run, _diagnoses(folder.diagnoses))

    with suppress(UsageError, ValueError, ArithmeticError):
        run.curves += _read_scaling(path)
    with suppress(UsageError, KeyError, ValueError, ArithmeticError, IndexError):
        profile = read_profile(path)
        run.profile_headline = headline(profile)
        run.profile_advice = list(advice_lines(advise(profile)))
        run.profile = profile

    return run


def _add_faults(run: RunData, faults: list[Moment]) -> None:
    """Put them between the events, of which no more remain than a page shows."""
    saves = [moment for moment in run.moments if moment.kind == "checkpoint"]
    incidents = [moment for moment in run.moments if moment.kind != "checkpoint"]
    run.num_moments = len(incidents) + len(faults)
    shown = evenly(saves, MAX_MOMENTS) + evenly(incidents, MAX_MOMENTS) + faults
    run.moments = sorted(shown, key=lambda moment: moment.time)


# Events of rank 0


def _add_rank_0(run: RunData, file: Path) -> None:
    """Read the events of rank 0, which has most of what a page shows."""
    run.num_bytes = file.lstat().st_size
    run.num_bytes_read = min(run.num_bytes, RANK_0_BYTES)

    curves = Curves()
    for event in sampled_events(file, most_bytes=RANK_0_BYTES):
        _add(run, curves, event)
    run.curves = curves.in_order()


def _add(run: RunData, curves: Curves, event: Mapping[str, Any]) -> None:
    """Take what the page shows of one event."""
    kind = event["kind"]
    step = event["step"]
    moment = float(event["time"])

    if event.get("number") == 0 or not run.attempts:
        run.attempts.append(AttemptTimes(begin=moment, last=moment))
    attempt = run.attempts[-1]
    attempt.last = max(attempt.last, moment)
    attempt.last_step = max(attempt.last_step, step)
    run.step = step if kind == "resume" else max(run.step, step)

    match kind:
        case "start":
            run.facts = {
                name: event[name]
                for name, type_ in _FACTS.items()
                if type(event.get(name)) is type_
            }
            run.end = {}
        case "resume":
            attempt.resumed_at = step
            curves.cut(step)
        case "first_step":
            lasted_s = seconds_of(event.get("seconds")) or 0.0
            attempt.first_step_at = moment
            attempt.begin = min(attempt.begin, moment - lasted_s)
        case "recovered":
            attempt.is_restart = True
        case "train" | "evaluation" | "logged":
            curves.add(event)
            if kind == "evaluation":
                attempt.evaluation_s += seconds_of(event.get("seconds")) or 0.0
                run.metrics = metrics_of(event)
        case "phases":
            _add_phases(run, 0, event)
        case "checkpoint":
            attempt.save_s += seconds_of(event.get("blocked_s")) or 0.0
            run.num_saves += 1
        case "end":
            run.end = dict(event)

    if kind in _SHOWN:
        run.moments.append(
            Moment(
                time=moment,
                kind=kind,
                step=step,
                text=_line_of(event),
            )
        )


def _line_of(event: Mapping[str, Any]) -> str:
    """The line that the display has for it; of a damaged event what it has of a message."""
    match event["kind"]:
        case "start":
            return f"{text(event.get('task'))} on {event.get('world_size')} ranks"
        case "end":
            return "done"
        case "error":
            return text(event.get("message"))

    try:
        return event_line(event) or ""
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return text(event.get("message"))


def _add_phases(run: RunData, rank: int, event: Mapping[str, Any]) -> None:
    """Take the times of a `phases` event, if they are times."""
    reported = event.get("phases_s")
    if not isinstance(reported, dict):
        return

    phases_s = {}
    for name in _PHASES & reported.keys():
        seconds = number(reported[name])
        if seconds is None:
            continue
        if not 0 <= seconds < MAX_SECONDS:
            return
        phases_s[name] = seconds

    times = PhaseTimes(
        time=float(event["time"]),
        step=event["step"],
        phases_s=phases_s,
    )
    run.phases.setdefault(rank, []).append(times)


# Other files


def _diagnoses(folder: Path) -> list[Moment]:
    """The faults that were diagnosed."""
    records = read_diagnoses(folder) if folder.is_dir() else []

    return [
        Moment(
            time=float(record["time"]),
            kind="fault",
            step=record["diagnosis"]["step"],
            text=record["sentence"],
        )
        for record in records[:MAX_MOMENTS]
        if unix_time(record["time"]) is not None
    ]


def _read_scaling(path: Path) -> list[Curve]:
    """The latest measurement and the latest prediction in RUN/scale: efficiency by ranks."""
    results: list[Measurement | Prediction] = [
        *read_scaling(path, Measurement)[-1:],
        *read_scaling(path, Prediction)[-1:],
    ]
    lines: dict[str, Line] = {}
    for result in results:
        lines |= efficiency_lines(result)

    curves = []
    for name, line in lines.items():
        by_ranks = {
            point.ranks: number(point.efficiency) for point in line if 0 < point.ranks < MAX_STEP
        }
        sizes = sorted(by_ranks)
        if sizes:
            values = [by_ranks[ranks] for ranks in sizes]
            curves.append(Curve(SCALING, name, sizes, values))

    return curves


class _RankPlace(TypedDict):
    """Where a rank runs."""

    rank: int
    host: str
    device: str


class _Environment(TypedDict):
    """What the page shows of environment.json."""

    ranks: list[_RankPlace]
    command: list[str]
    torch: str
    python: str


def _add_environment(run: RunData, path: Path) -> None:
    """Take the command, the versions, and where each rank runs."""
    try:
        record = read_record(_Environment, path)
    except (OSError, ValueError):
        return

    places: dict[str, list[int]] = {}
    for entry in record["ranks"]:
        place = f"{entry['host']} ({entry['device']})"
        places.setdefault(place, []).append(entry["rank"])
        run.hosts[entry["rank"]] = entry["host"]

    run.environment = {
        "command": " ".join(record["command"]),
        "torch": record["torch"],
        "Python": record["python"],
    }
    for place, ranks in list(places.items())[:MAX_SETTINGS]:
        run.environment[place] = f"ranks {number_ranges(ranks)}"


def _read_settings(path: Path) -> dict[str, str]:
    """The settings in config.toml, as text."""
    try:
        record = read_toml(path)
    except (OSError, ValueError):
        return {}

    settings = {}
    for section, values in record.items():
        if not isinstance(values, dict):
            continue

        for name, value in values.items():
            shown = value if isinstance(value, str) else json.dumps(value, default=str)
            settings[f"{section}.{name}"] = shown

    return dict(list(settings.items())[:MAX_SETTINGS])
