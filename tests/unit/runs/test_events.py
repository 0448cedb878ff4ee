"""The event log survives what happens to files, and the reporter what happens to sinks."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.runs.events import Event, EventLog, Reporter, read_events


def test_events_are_stamped_and_keep_the_last_known_step() -> None:
    events: list[Event] = []
    reporter = Reporter([events.append], rank=3, host="node-b")
    before = time.time()

    reporter.report("note", message="hello")
    reporter.report("train", step=7, loss=0.5)
    reporter.report("warning", message="careful")

    # some steps after its own, when it is complete
    reporter.report("checkpoint", step=5, path="x")
    reporter.report("note", message="y")
    assert [event["step"] for event in events] == [0, 7, 7, 5, 7]
    assert [event["number"] for event in events] == [0, 1, 2, 3, 4]
    assert {(event["rank"], event["host"]) for event in events} == {(3, "node-b")}
    assert events[1]["kind"] == "train"
    assert events[1]["loss"] == 0.5
    assert before <= events[0]["time"] <= time.time()


def test_one_line_of_json_per_event_is_on_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    log = EventLog(path)

    log(
        {
            "kind": "train",
            "step": 1,
            "path": Path("/a"),
            "metrics": {"accuracy": 0.5},
            "sizes": (1, 2),
        }
    )
    log({"kind": "note", "message": "line\nbreak, \N{EIGHTH NOTE}"})

    lines = path.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["train", "note"]
    assert list(read_events(path)) == [
        {"kind": "train", "step": 1, "path": "/a", "metrics": {"accuracy": 0.5}, "sizes": [1, 2]},
        {"kind": "note", "message": "line\nbreak, \N{EIGHTH NOTE}"},
    ]
    log.close()


def test_numbers_that_are_not_finite_stay_valid_json_and_are_restored(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = EventLog(path)

    log({"loss": math.nan, "grad_norm": math.inf, "metrics": {"low": -math.inf}})
    log.close()

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (event,) = read_events(path)
    assert math.isnan(event["loss"])
    assert (event["grad_norm"], event["metrics"]["low"]) == (math.inf, -math.inf)


def test_an_incomplete_last_line_is_left_out_and_the_next_run_starts_a_new_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "los')
    assert list(read_events(path)) == [{"step": 1}]

    log = EventLog(path)
    log({"step": 3})
    log.close()

    assert list(read_events(path)) == [{"step": 1}, {"step": 3}]


def test_a_second_log_on_a_whole_file_only_appends(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for step in (1, 2):
        log = EventLog(path)
        log({"step": step})
        log.close()

    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_killed_process_loses_nothing_it_has_reported(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    code = (
        "import os, signal, sys, pathlib; from drumline.runs.events import EventLog\n"
        "log = EventLog(pathlib.Path(sys.argv[1]))\n"
        "for step in range(100): log({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False)

    assert ended.returncode == -9
    assert [event["step"] for event in read_events(path)] == list(range(100))


def test_a_write_that_fails_half_way_does_not_spoil_the_next_line(tmp_path: Path) -> None:
    class HalfFull:
        def __init__(self, path: Path) -> None:
            self.file = path.open("ab", buffering=0)
            self.room = 8

        def write(self, data: bytes) -> int:
            if self.room == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = self.file.write(data[: self.room])
            self.room -= written
            return written

    path = tmp_path / "log.jsonl"
    log = EventLog(path)
    log._file.close()
    disk = HalfFull(path)
    log._file = disk  # type: ignore[assignment]

    with pytest.raises(OSError, match="No space left") as failed:
        log({"step": 1, "kind": "train"})
    assert failed.value.filename == str(path)
    disk.room = 10**6
    log({"step": 2})
    disk.file.close()

    assert list(read_events(path)) == [{"step": 2}]


def test_a_failing_sink_ends_nothing_and_the_others_get_one_warning() -> None:
    events: list[Event] = []
    disk_is_full = True

    def failing(event: Event) -> None:
        if disk_is_full:
            raise OSError(errno.ENOSPC, "No space left on device", "rank-00000.jsonl")

    reporter = Reporter([failing, events.append], rank=0, host="a")
    for step in (1, 2):
        reporter.report("train", step=step)
    disk_is_full = False
    reporter.report("train", step=3)
    disk_is_full = True
    reporter.report("train", step=4)

    assert [(event["kind"], event["step"]) for event in events] == [
        ("warning", 1), ("train", 1), ("train", 2), ("train", 3), ("warning", 4), ("train", 4)
    ]  # fmt: skip
    assert "No space left on device" in events[0]["message"]


def test_threads_report_whole_events(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Reporter([EventLog(path)], rank=0, host="a") as reporter:
        threads = [
            threading.Thread(
                target=lambda: [reporter.report("note", message="x" * 5000) for _ in range(50)]
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert sum(len(event["message"]) for event in read_events(path)) == 4 * 50 * 5000


def test_closing_the_reporter_closes_its_sinks(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl")

    with Reporter([log, lambda event: None], rank=0, host="a"):
        pass

    with pytest.raises(ValueError, match="closed"):
        log({"step": 1})


def test_reading_events_needs_no_torch() -> None:
    code = "import sys, drumline.runs.events, drumline.metrics.display; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)
