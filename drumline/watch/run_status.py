"""The status of a run, read from its folder: which job trains in it, what each rank does, how it
ended. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drumline.base.untrusted import open_regular
from drumline.runs.events import parse_line
from drumline.runs.run_folder import RunFolder, job_at_work
from drumline.watch.status_file import STATUS_FILE, read_status_file

FRESH_S = 10.0
"""The leader of the sidecars writes every second; on slow storage it may take a few."""

RESTART_S = 60.0
"""A job that restarts does not hold its run folder for at most this long."""

FATAL_NOTICES = ("hang", "failure")
ENDS = {
    "end": "done at step {step}",
    "preempted": "preempted, saved step {step}",
    "error": "failed at step {step}: {message}",
}
"""How a run ended, by the kind of its last event."""

_TAIL_BYTES = 1 << 16
RunState = Literal["running", "done", "preempted", "failed", "stopped"]
"""In one word; `stopped`: its last events are missing, since it was killed or interrupted."""

_STATES: dict[str, RunState] = {"end": "done", "preempted": "preempted", "error": "failed"}


@dataclass(frozen=True)
class RunStatus:
    """What is known about a run at one moment."""

    run: Path
    status: dict[str, Any] | None
    age_s: float
    """How old the status is."""

    holder: str | None
    """The process that trains in the run folder, as far as this machine can see."""

    last_event: dict[str, Any] | None
    """The last event of rank 0, if it ends an attempt."""

    @property
    def is_live(self) -> bool:
        """Whether a sidecar writes the status now."""
        return self.status is not None and self.age_s <= FRESH_S and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether no job trains here, as far as this machine can see, and none is about to
        restart."""
        if self.holder is not None:
            return False
        if self.status is None or self.status["has_ended"] or self.age_s > RESTART_S:
            return True

        # a launcher may restart it
        if (last := self.last_event) is None or last["kind"] == "error":
            return False

        # a newer one is of the next attempt
        last_s = max(last["time"], last.get("refused_at", 0.0))
        return bool(self.status["time"] <= last_s + FRESH_S)

    @property
    def state(self) -> RunState:
        """In one word."""
        if not self.has_ended:
            return "running"
        return "stopped" if self.last_event is None else _STATES[self.last_event["kind"]]

    @property
    def is_unknown(self) -> bool:
        """Whether no job trains here, and none with a watchdog ever did."""
        return self.has_ended and self.status is None and self.last_event is None

    def message(self) -> str | None:
        """How the run ended, or why its status is missing or old; None: it is current."""
        if self.is_live:
            return None
        if self.has_ended:
            return self._how_it_ended()
        if self.status is None:
            return (
                f"{self.holder} is training in {self.run} without a watchdog: it has just started, it has one rank "
                "(--watch.sidecar on watches that too), or --watch.sidecar is off"
            )

        if self.holder is None:
            return f"the status is {self.age_s:.0f} s old and no job is in {self.run}: it may be about to restart"

        return (
            f"the status is {self.age_s:.0f} s old, though {self.holder} is in {self.run}: the sidecar on "
            f"{self.status['leader']} has exited, or the storage of the run folder hangs"
        )

    def _how_it_ended(self) -> str:
        """By its last event; without one, by its status."""
        if (last := self.last_event) is not None:
            how = ENDS[last["kind"]].format(
                step=last.get("step"),
                message=last.get("message"),
            )
            return f"the run has ended: {how}"

        if self.status is None:
            return f"no job is training in {self.run}, as far as this machine can see, and it never had a watchdog"
        if self.status["has_ended"]:
            return "the run has ended"

        return f"the run has ended, or continues where this machine cannot see it: its status is {self.age_s:.0f} s old"


class RunStatusReader:
    """Reads the status repeatedly. Hosts' clocks differ: a status that changes between two reads is
    fresh, whatever its time says."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._folder = RunFolder(run)
        self._changed: tuple[float, float] | None = None
        """The time in the status, and when that was first read, by this machine's clock."""

    def read(self) -> RunStatus:
        """The status of this moment."""
        # In this order: a run that ends meanwhile has written its last event before it releases the
        # folder.
        status = read_status_file(self._run / STATUS_FILE)
        holder = job_at_work(self._folder)
        return RunStatus(self._run, status, self._age(status), holder, _last_event(self._folder))

    def _age(self, status: dict[str, Any] | None) -> float:
        """How old the status is: by its time, or since it was seen to change."""
        if status is None:
            return 0.0

        by_clock: float = max(0.0, time.time() - status["time"])
        if self._changed is None:
            self._changed = status["time"], time.monotonic() - by_clock
        elif self._changed[0] != status["time"]:
            self._changed = status["time"], time.monotonic()

        return min(by_clock, time.monotonic() - self._changed[1])


def _last_event(folder: RunFolder) -> dict[str, Any] | None:
    """The last event of rank 0 if it ends an attempt, from the end of its file."""
    try:
        with open_regular(folder.event_file(0)) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = [line for line in file.read().splitlines() if line.strip()]
    except OSError:
        return None

    events = [parse_line(line) or {} for line in reversed(lines)]
    event = _closing(events)

    # A command that is refused leaves a run that ended as it is.
    before = _closing(_before_refusals(events))
    if event.get("kind") == "error" and before.get("kind") in ("end", "preempted"):
        event = {**before, "refused_at": event.get("time")}

    is_last = str(event.get("kind")) in ENDS and type(event.get("time")) in (int, float)

    return event if is_last else None


def _is_late(event: Mapping[str, Any]) -> bool:
    """Whether it may follow the end: a tracker that is closed warns, a mirror reports. The first
    event of the next start has number 0."""
    return event.get("kind") in ("warning", "note", "mirrored") and event.get("number") != 0


def _closing(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The newest that counts; the newest is first."""
    return next((event for event in events if not _is_late(event)), {})


def _before_refusals(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the starts that only warned and failed."""
    while events and events[0].get("kind") == "error":
        numbers = [event.get("number") for event in events]
        num_events = numbers.index(0) + 1 if 0 in numbers else len(events)

        kinds = {str(event.get("kind")) for event in events[:num_events]}
        if not kinds <= {"error", "warning", "note", "mirrored"}:
            break
        events = events[num_events:]
    return events
