"""One look at a run from outside: its status, who is at work in it, and how it ended. Only reads; no torch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.engine.run_folder import RunFolder, job_at_work
from drumline.metrics.json_lines import parse_line
from drumline.untrusted import open_regular
from drumline.watch.status_file import STATUS_FILE, read_status

FRESH_S = 10.0
"""The leader of the sidecars writes every second; on slow storage it may take a few."""
RESTART_S = 60.0
"""A job that is started again is out of its folder for so long at most."""
_TAIL = 1 << 16
FATAL_NOTICES = ("hang", "failure")


@dataclass(frozen=True)
class Ending:
    """The last event of an attempt."""

    words: str
    """`done at step 460`."""
    time: float
    is_final: bool
    """Whether no launcher starts the job again by itself."""


@dataclass(frozen=True)
class Look:
    """What is known of a run at a moment."""

    run: Path
    status: dict[str, Any] | None
    age_s: float
    """Of the status."""
    worker: str | None
    """Who holds the run folder, as far as this machine can see."""
    ending: Ending | None
    """What the run's last word was, if it was one."""

    @property
    def is_live(self) -> bool:
        return self.status is not None and self.age_s <= FRESH_S and not self.has_ended

    @property
    def has_ended(self) -> bool:
        if self.worker is not None:
            return False
        if self.status is None or self.status["has_ended"] or self.age_s > RESTART_S:
            return True
        # A status that is newer is of the next attempt.
        is_of_status = self.ending is not None and self.status["time"] <= self.ending.time + FRESH_S
        return is_of_status and self.ending is not None and self.ending.is_final

    @property
    def is_unknown(self) -> bool:
        """Whether there is nothing here to watch, nor was."""
        return self.has_ended and self.status is None and self.ending is None

    def trouble(self) -> str | None:
        """Why there is nothing to show, or not what it should be; None: all is well."""
        if self.is_live:
            return None
        if self.has_ended:
            return self._end()
        if self.status is None:
            return (
                f"{self.worker} is training in {self.run}, but nobody watches it: it has just started, it has one rank "
                "(--watch.sidecar on watches that too), or --watch.sidecar is off"
            )
        if self.worker is None:
            return f"the status is {self.age_s:.0f} s old and nobody is in {self.run}: the job may be about to restart"
        return (
            f"the status is {self.age_s:.0f} s old, though {self.worker} is in {self.run}: the sidecar on "
            f"{self.status['leader']} has exited, or the storage of the run folder hangs"
        )

    def _end(self) -> str:
        if self.ending is not None:
            return f"the run has ended: {self.ending.words}"
        if self.status is None:
            return (
                f"nobody is training in {self.run}, as far as this machine can see, and it was never watched"
            )
        if self.status["has_ended"]:
            return "the run has ended"
        notices = self.status["notices"]
        if notices and notices[-1]["kind"] in FATAL_NOTICES:
            return f"the run has ended, or continues where this machine cannot see it, {self.age_s:.0f} s after that"
        return (
            f"the run has ended for an unknown reason, or continues where this machine cannot see it: its status is "
            f"{self.age_s:.0f} s old"
        )


class Looker:
    """Looks again and again. Clocks of hosts differ: a status that changes before one's eyes is fresh, whatever it
    says."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._changed: tuple[float, float] | None = None

    def look(self) -> Look:
        # In this order: a run that ends meanwhile has said so before it lets go of the folder.
        status, worker = read_status(self._run / STATUS_FILE), job_at_work(RunFolder(self._run))
        return Look(self._run, status, self._age(status), worker, _ending(RunFolder(self._run)))

    def _age(self, status: dict[str, Any] | None) -> float:
        if status is None:
            return 0.0
        by_clock: float = max(0.0, time.time() - status["time"])
        if self._changed is None:
            self._changed = status["time"], time.monotonic() - by_clock
        elif self._changed[0] != status["time"]:
            self._changed = status["time"], time.monotonic()
        return min(by_clock, time.monotonic() - self._changed[1])


def _ending(folder: RunFolder) -> Ending | None:
    """The last event of rank 0, if nothing can follow it in this attempt."""
    try:
        with open_regular(folder.event_file(0)) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = [line for line in file.read().splitlines() if line.strip()]
    except OSError:
        return None
    event = (parse_line(lines[-1]) if lines else None) or {}
    step, at = event.get("step"), event.get("time", 0)
    words = {
        "end": f"done at step {step}",
        "preempted": f"preempted, saved step {step}",
        "error": f"failed at step {step}: {event.get('message')}",
    }.get(str(event.get("kind")))
    if words is None or type(at) not in (int, float):
        return None
    return Ending(words, float(at), is_final=event["kind"] != "error")
