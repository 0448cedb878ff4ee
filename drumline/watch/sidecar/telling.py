"""Where a sidecar says what it found: the screen at once, the watch folder for the launcher, the run folder for later.

The run folder may be what hangs. So it is written to by a thread of its own, for which nobody waits long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drumline.errors import as_lines
from drumline.metrics.json_lines import JsonLines
from drumline.terminal import print_message
from drumline.untrusted import check_own_folder, make_own_folder, parse_json, read_regular, replace_text
from drumline.watch.diagnosis.diagnosis import Diagnosis
from drumline.watch.diagnosis.diagnosis_files import write_diagnosis
from drumline.watch.facts import Picture
from drumline.watch.sidecar.terms import Terms
from drumline.watch.status.record import PLACE

LAUNCH_FILE = Path("watch") / "launch.json"
NOTICES = "notices.jsonl"
# How long the end of a sidecar waits for the run folder.
DRAIN_S = 3.0


class Teller:
    """Of one sidecar."""

    def __init__(self, terms: Terms) -> None:
        self._folder = Path(terms.folder)
        self._run = None if terms.run is None else Path(terms.run)
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self._num_events = 0
        self._complaints: set[int | None] = set()
        threading.Thread(target=self._work, name="run-folder", daemon=True).start()

    def say(self, sentence: str) -> None:
        """On the screen; a line of its own, whatever a display has on it."""
        with contextlib.suppress(OSError):  # nobody reads it any more
            print_message(*as_lines(sentence))

    def write_down(self, alarm: str, diagnosis: Diagnosis, picture: Picture, action: str, at: float) -> None:
        """In the run folder: the diagnosis with all that was seen, and the event."""
        if (run := self._run) is not None:
            self._jobs.put(lambda: self._write_diagnosis(run, alarm, diagnosis, picture, action, at))

    def hand_to_launcher(self, alarm: str, diagnosis: Diagnosis, action: str, *, was_told: bool) -> None:
        """In the watch folder, before anything is ended: the launcher reads it when its ranks are gone. `was_told`:
        on this node's screen."""
        record = {"alarm": alarm, "action": action, "was_told": was_told, "diagnosis": diagnosis.to_json()}
        replace_text(self._folder / "diagnosis.json", json.dumps(record))

    def notice(
        self, kind: str, *, rank: int | None, host: str, message: str, what: str = "", step: int = 0
    ) -> None:
        """For rank 0 to report with its next log line. Where nobody does so (there is no such file: a script, a loop of
        the user's own, or another node) it is printed here, and logged as an event."""
        record = {
            "kind": kind,
            "time": time.time(),
            "rank": rank,
            "host": host,
            "message": message,
            "what": what,
        }
        try:
            with (self._folder / NOTICES).open("r+b") as file:
                file.seek(0, os.SEEK_END)
                file.write(json.dumps(record).encode() + b"\n")
        except OSError:
            self.say(message)
            if (run := self._run) is not None:
                self._jobs.put(lambda: self._append_event(run, {"step": step, **record}))

    def show_status(self, record: Mapping[str, Any]) -> None:
        """What `drumline watch` reads; left out while the one before is still being written."""
        if (run := self._run) is not None and not self._jobs.unfinished_tasks:
            self._jobs.put(lambda: _write_status(run, record))

    async def drain(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while self._jobs.unfinished_tasks and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except OSError as error:
                self._complain(error)
            finally:
                self._jobs.task_done()

    def _complain(self, error: OSError) -> None:
        """Once of a kind: a full disk is full every second."""
        if error.errno not in self._complaints:
            self._complaints.add(error.errno)
            self.say(f"the watch could not write to the run folder: {error}")

    def _write_diagnosis(
        self, run: Path, alarm: str, diagnosis: Diagnosis, picture: Picture, action: str, at: float
    ) -> None:
        if run.exists():
            check_own_folder(run, follow_links=True)
        write_diagnosis(
            run / "diagnoses",
            alarm=alarm,
            diagnosis=diagnosis,
            picture=picture,
            action=action,
            launch=launch_of(run),
            at=at,
        )
        place = {"rank": diagnosis.rank, "host": diagnosis.host, "step": diagnosis.step}
        said = {"cause": diagnosis.cause, "action": action, "message": diagnosis.sentence(alarm)}
        self._append_event(run, {"time": at, "kind": alarm, **place, **said})

    def _append_event(self, run: Path, event: Mapping[str, Any]) -> None:
        make_own_folder(run, follow_links=True)
        make_own_folder(run / "events")
        lines = JsonLines(run / "events" / "watch.jsonl")
        lines.append(json.dumps({"number": self._num_events, **event}))
        lines.close()
        self._num_events += 1


def launch_of(run: Path) -> str:
    """The name of this launch, which a restart keeps; rank 0 wrote it down."""
    try:
        return str(parse_json(read_regular(run / LAUNCH_FILE))["launch"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _write_status(run: Path, record: Mapping[str, Any]) -> None:
    """Not before the run has made its folder."""
    if run.is_dir():
        check_own_folder(run, follow_links=True)
        make_own_folder((run / PLACE).parent)
        replace_text(run / PLACE, json.dumps(record))
