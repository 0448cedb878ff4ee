"""Where a sidecar reports: on the terminal at once, in the watch folder for the launcher, and in
the run folder. The last one may hang, so a separate thread writes to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumline.base.errors import as_lines
from drumline.base.text import print_message
from drumline.base.untrusted import (
    check_own_folder,
    make_own_folder,
    parse_json,
    read_regular,
    replace_text,
)
from drumline.runs.events import JsonLines
from drumline.watch.cluster_state import ClusterState
from drumline.watch.diagnosis.diagnosis import RaisedAlarm
from drumline.watch.diagnosis.diagnosis_files import write_diagnosis
from drumline.watch.sidecar.sidecar_options import SidecarOptions
from drumline.watch.status_file import STATUS_FILE
from drumline.watch.watch_folder import DIAGNOSIS, SidecarDiagnosis, claim_report

LAUNCH_FILE = Path("watch") / "launch.json"
NOTICES = "notices.jsonl"

# How long the end of a sidecar waits for the run folder.
DRAIN_S = 3.0


class SidecarReporter:
    """Prints, and queues writes to the run folder."""

    def __init__(self, options: SidecarOptions) -> None:
        self._folder = Path(options.folder)
        self._run = None if options.run is None else Path(options.run)
        self._writer = f"{options.host}-{os.getpid()}"
        """Names this process among the sidecars that write to the run folder."""

        self._thread = ThreadPoolExecutor(1, "run-folder")
        self._newest: Future[None] | None = None
        """The write that was queued last."""

        self._num_events = 0
        self._reported_errors: set[int | None] = set()

    def print(self, message: str) -> None:
        """Print on a new line, even if a display is on the terminal."""
        with contextlib.suppress(OSError):  # the pipe has no reader
            print_message(*as_lines(message))

    def print_alarm(self, alarm: str, message: str) -> None:
        """A failure only if the launcher has not reported it."""
        if alarm != "failure" or claim_report(self._folder):
            self.print(message)

    def write_diagnosis(self, raised: RaisedAlarm, cluster: ClusterState, unix_s: float) -> None:
        """In the run folder: the diagnosis with all observations, and the event."""
        diagnosis = raised.diagnosis

        def write(run: Path) -> None:
            if run.exists():
                check_own_folder(run, follow_links=True)

            folder = run / "diagnoses"
            write_diagnosis(folder, raised, cluster, launch=launch_of(run), unix_s=unix_s)
            event = {
                "time": unix_s,
                "kind": raised.alarm,
                "rank": diagnosis.rank,
                "host": diagnosis.host,
                "step": diagnosis.step,
                "cause": diagnosis.cause,
                "action": raised.action,
                "message": raised.sentence,
            }
            self._append_event(run, event)

        self._queue(write)

    def write_for_launcher(self, raised: RaisedAlarm, *, was_printed: bool) -> None:
        """In the watch folder, for the launcher, before anything is killed. `was_printed`: on this
        node's terminal."""
        diagnosis = raised.diagnosis
        record = SidecarDiagnosis(
            alarm=raised.alarm,
            action=raised.action,
            sentence=raised.sentence,
            was_printed=was_printed,
            what=diagnosis.what,
            rank=diagnosis.rank,
            host=diagnosis.host,
            is_ranks_error=diagnosis.is_ranks_error,
        )
        replace_text(self._folder / DIAGNOSIS, json.dumps(asdict(record)))

    def notify(
        self,
        kind: str,
        *,
        rank: int | None,
        host: str,
        message: str,
        what: str = "",
        step: int = 0,
    ) -> None:
        """For rank 0 to report with its next log line. If there is no notices file (a script, a
        user's own loop, or another node), it is printed here, and logged as an event."""
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
            self.print(message)
            self._queue(lambda run: self._append_event(run, {"step": step, **record}))

    def write_status(self, record: Mapping[str, Any]) -> None:
        """The file for `drumline watch`; skipped while the previous one is still being written."""
        if self._newest is None or self._newest.done():
            self._queue(lambda run: write_status_file(run, record, writer=self._writer))

    async def drain(self) -> None:
        """Wait until the queue is empty, for a few seconds."""
        if self._newest is not None:
            await asyncio.wait([asyncio.wrap_future(self._newest)], timeout=DRAIN_S)

    def _queue(self, write: Callable[[Path], None]) -> None:
        """Have the thread write to the run folder, if there is one."""
        if self._run is not None:
            self._newest = self._thread.submit(self._write, write, self._run)

    def _write(self, write: Callable[[Path], None], run: Path) -> None:
        """On the thread."""
        try:
            write(run)
        except OSError as error:
            # Once per kind: a full disk would fail every second.
            if error.errno not in self._reported_errors:
                self._reported_errors.add(error.errno)
                self.print(f"the watchdog could not write to the run folder: {error}")

    def _append_event(self, run: Path, event: Mapping[str, Any]) -> None:
        """On the thread: to the events of the watchdog."""
        make_own_folder(run, follow_links=True)
        make_own_folder(run / "events")
        with contextlib.closing(JsonLines(run / "events" / "watch.jsonl")) as lines:
            lines.append(json.dumps({"number": self._num_events, **event}))
        self._num_events += 1


def launch_of(run: Path) -> str:
    """The name of this launch, which rank 0 has written and a restart keeps."""
    try:
        return str(parse_json(read_regular(run / LAUNCH_FILE))["launch"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def write_status_file(run: Path, record: Mapping[str, Any], *, writer: str) -> None:
    """Not before the run has made its folder. In a network partition each side has a leader, and
    after a restart the sidecar before may still write: `writer` tells them apart."""
    if run.is_dir():
        check_own_folder(run, follow_links=True)
        make_own_folder((run / STATUS_FILE).parent)
        replace_text(run / STATUS_FILE, json.dumps(record), writer=writer)
