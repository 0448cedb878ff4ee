"""What the watch noticed reaches the run's own events, its log and its summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.rank.watched.job_connection import JobConnection
from drumline.report.verify.run_check import verify_run
from drumline.runs.events import JsonLines, Reporter, read_events
from drumline.training.loop import Loop
from drumline.training.output import WatchNotices
from drumline.watch.sidecar.sidecar_reporter import NOTICES
from tests.jobs import Classify, make_config, train_here

SLOW = "rank 3 on node-b takes 5.1x as long as its peers in forward"
STALL = "stall: rank 1 on node-a has been in data for 4 s. Try: wait"


def notice(
    kind: str, message: str, rank: int | None = 3, host: str = "node-b", what: str = SLOW
) -> str:
    record = {
        "kind": kind,
        "time": 1.0,
        "rank": rank,
        "host": host,
        "message": message,
        "what": what,
    }
    return json.dumps(record)


def test_notices_are_read_once_whole_and_whatever_else_is_in_the_file(tmp_path: Path) -> None:
    events: list[Any] = []
    reporter = Reporter([events.append], rank=0, host="node-a")
    WatchNotices(None).report(reporter)
    notices = WatchNotices(tmp_path)
    notices.report(reporter)
    assert events == notices.stragglers == []
    lines = JsonLines(tmp_path / NOTICES)
    for text in (
        notice("straggler", f"straggler: {SLOW}. Try: look"),
        notice("stall", STALL, 1, "node-a"),
        "[1]",
        '{"kind": "stall"}',
        notice("later", "of another version"),
    ):
        lines.append(text)
    with (tmp_path / NOTICES).open("a") as file:
        file.write('{"kind": "straggler", "mess')
    notices.report(reporter)
    notices.report(reporter)
    reported = [
        (event["kind"], event.get("about_rank"), event.get("about_host")) for event in events
    ]
    assert reported == [("straggler", 3, "node-b"), ("stall", 1, "node-a")]
    assert [event["message"] for event in events[:2]] == [f"straggler: {SLOW}. Try: look", STALL]
    assert {(event["rank"], event["host"]) for event in events} == {(0, "node-a")}
    with (tmp_path / NOTICES).open("a") as file:
        file.write('age": "straggler: all of it", "what": "all of it"}\n')
    notices.report(reporter)
    assert events[-1]["message"] == "straggler: all of it"
    lines.append(notice("straggler", "any text", what="rank 3 on node-b takes 9x as long"))
    notices.report(reporter)
    assert notices.stragglers == ["rank 3 on node-b takes 9x as long", "all of it"]
    lines.close()


def test_a_run_tells_them_and_sums_them_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = tmp_path / "watch"
    run = tmp_path / "run"
    watch.mkdir()
    monkeypatch.setattr(JobConnection, "watch_folder", property(lambda self: watch))
    take_step = Loop.take_step

    def noticed(self: Loop, *args: Any) -> None:
        take_step(self, *args)
        if self.progress.step in (3, 5):
            with (watch / NOTICES).open("a") as file:
                kind, message = (
                    ("straggler", f"straggler: {SLOW}. Try: look")
                    if self.progress.step == 3
                    else ("stall", STALL)
                )
                file.write(notice(kind, message) + "\n")

    monkeypatch.setattr(Loop, "take_step", noticed)
    train_here(make_config(steps=8), Classify, run)
    events = list(read_events(run / "events" / "rank-00000.jsonl"))
    reported = [
        (event["kind"], event["step"])
        for event in events
        if event["kind"] in ("straggler", "stall")
    ]
    assert reported == [("straggler", 4), ("stall", 6)]
    assert events[-1]["stragglers"] == [SLOW]
    log = (run / "logs" / "rank-00000.log").read_text()
    assert f" straggler: {SLOW}. Try: look\n" in log
    assert f" {STALL}\n" in log
    assert f"\n  straggler    {SLOW}\n" in log
    assert verify_run(run, lambda text: None).problems == []
