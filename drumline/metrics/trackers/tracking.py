"""Hands a run's events to a tracker on a thread of its own: one that fails, hangs or is slow does
not hold training up.

Rank 0 alone tracks. The id of the tracker's run is in the run folder, so that a resumed run
continues it. What the tracker then lacks of the steps before is read from the run's own event file.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from drumline.base.errors import summary
from drumline.base.untrusted import make_own_folder, parse_json, read_regular, replace_text
from drumline.metrics.trackers.tracker import RECORDED, Outcome, Tracker, past_events, record_of
from drumline.runs.events import Event

MAX_WAITING = 10_000
MAX_BATCH = 200
RETRY_S = 60.0
CLOSE_S = 10.0
MAX_CLOSE_S = 60.0
"""How long the end of a run waits for a tracker that does not answer, and for one that does."""

_THREAD = "drumline-tracker"
_LOGIN = re.compile(r"//[^/\s]+@")
_ID = re.compile(r"[0-9a-f]{16}")


class Tracking:
    """A sink for one tracker. Nothing here waits for the tracker but `wait`, and that not for
    long."""

    def __init__(
        self,
        tracker: Tracker,
        *,
        folder: Path,
        event_file: Path,
        id_file: Path,
        report: Callable[..., None],
    ) -> None:
        """`report`: the reporter's, for what the user should know."""
        self._tracker = tracker
        """Only the thread calls it."""

        self._report = report
        self._folder = folder
        self._event_file = event_file
        """Has all events of the run, also those of earlier starts."""

        self._id_file = id_file
        """Has the id of the tracker's run."""

        self._resume_step = 0
        """The step of the checkpoint that the run continues from; 0: it is new."""

        self._outcome: Outcome = "failed"
        """How the run ended, as far as it is known."""

        self._num_events = 0
        """Those that the tracker is to have, with dropped ones."""

        self._num_written = 0
        """Those that it has."""

        self._warned_of: set[str] = set()
        """The topics of warnings, each of which is given once."""

        self._changed = threading.Condition()
        """Notified when an event comes, and at the end."""

        self._waiting: deque[Event] = deque()
        """For the thread."""

        self._is_closing = False
        """Whether no more events follow."""

        self._busy_since: float | None = None
        """When the call of the tracker began in which the thread is; None: it waits for events."""

        name = f"{_THREAD}-{tracker.name}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """As a sink of the run's events."""
        match event["kind"]:
            case "resume":
                self._resume_step = event["step"]
            case "preempted":
                self._outcome = "preempted"
            case "first_step" | "train" | "evaluation" | "logged" | "end":
                if event["kind"] == "end":
                    self._outcome = "finished"
                self._put(event)

    def _put(self, event: Event) -> None:
        """For the thread; dropped if too many wait for it."""
        with self._changed:
            self._num_events += _count([event])
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(event)
                self._changed.notify()
                return

        what = f"is too slow: {MAX_WAITING:,} events wait for it, and the next ones are dropped"
        self._warn("slow", what)

    def finish(self) -> None:
        """No more events follow."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def wait(self, end: float) -> None:
        """Until the tracker has everything, does not answer, or the monotonic clock is at `end`."""
        while self._thread.is_alive() and time.monotonic() < end and not self._is_silent():
            self._thread.join(0.05)

        self._thread.join(0.1)
        lost = self._num_events - self._num_written
        what = f"lacks {lost} of {self._num_events} events of this run"
        if self._thread.is_alive():
            self._warn("end", f"does not answer, and {what}")
        elif lost:
            self._warn("end", what)

    def _is_silent(self) -> bool:
        """Whether the tracker does not answer."""
        busy_since = self._busy_since
        return busy_since is not None and time.monotonic() - busy_since >= CLOSE_S

    # The thread

    def _work(self) -> None:
        """A run that has nothing for the tracker does not open it."""
        events = self._take()
        if not events or not self._open():
            return

        if not self._tracker.keeps_past and self._resume_step:
            self._attempt(self._write_past)

        while events:
            if self._attempt(partial(self._write, events)):
                self._num_written += _count(events)
            events = self._take()

        self._attempt(lambda: self._tracker.close(self._outcome))

    def _take(self) -> list[Event]:
        """What waits, once there is something; nothing when the run is over."""
        self._busy_since = None
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            self._busy_since = time.monotonic()
            size = min(len(self._waiting), MAX_BATCH)
            return [self._waiting.popleft() for _ in range(size)]

    def _open(self) -> bool:
        """Again and again, while events wait; False: the run is over."""
        while not self._attempt(self._open_once):
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closing, RETRY_S):
                    return False
        return True

    def _open_once(self) -> None:
        """Report where people find the run."""
        run = self._read_id() if self._id_file.exists() else self._make_id()
        address = self._tracker.open(run, resume_step=self._resume_step)
        self._report("note", message=f"{self._tracker.name}: {address}")

    def _read_id(self) -> str:
        """That of the start before."""
        run = str(parse_json(read_regular(self._id_file))["run"])
        if _ID.fullmatch(run) is None:  # it becomes a part of a query
            raise ValueError(
                f"{self._id_file} has {run!r} in place of the id of a run; remove the file"
            )
        return run

    def _make_id(self) -> str:
        """Written before the tracker knows of it: a kill in between must not lead to a second
        run."""
        run = secrets.token_hex(8)
        make_own_folder(self._id_file.parent)
        replace_text(self._id_file, json.dumps({"run": run}) + "\n")
        return run

    def _write_past(self) -> None:
        """What the run did before this start."""
        events = past_events(self._event_file)
        while batch := [*islice(events, MAX_BATCH)]:
            self._busy_since = time.monotonic()
            self._write(batch)

    def _write(self, events: Iterable[Event]) -> None:
        """What of it the tracker does not have yet."""
        records = []
        for event in events:
            record = record_of(event, self._folder)
            values = {
                name: value
                for name, value in record.values.items()
                if not self._tracker.has(name, record.step)
            }
            if values:
                records.append(replace(record, values=values))

        if records:
            self._tracker.write(records)

    def _attempt(self, action: Callable[[], Any]) -> bool:
        """Whether it worked; what it raises is a warning."""
        self._busy_since = time.monotonic()
        try:
            action()
        except Exception as error:
            reason = _LOGIN.sub("//***@", summary(error))
            self._warn("failure", f"failed: {reason}; training continues")
            return False

        return True

    def _warn(self, topic: str, what: str) -> None:
        """Once for each topic."""
        if topic in self._warned_of:
            return

        self._warned_of.add(topic)
        message = f"{self._tracker.name} {what}; {self._event_file} has everything"
        self._report("warning", message=message)


def _count(events: Iterable[Event]) -> int:
    """Those that a tracker shows."""
    return sum(event["kind"] in RECORDED for event in events)


def close_all(sinks: Sequence[Tracking]) -> None:
    """Wait for all trackers at the same time: no longer than for one."""
    for sink in sinks:
        sink.finish()
    end = time.monotonic() + MAX_CLOSE_S
    for sink in sinks:
        sink.wait(end)


def has_unfinished_tracker() -> bool:
    """Whether a tracker still does not answer after `close_all`: its package might block the exit
    of Python, too."""
    return any(thread.name.startswith(_THREAD) for thread in threading.enumerate())
