"""A tracker gets each event once, under stable names, and whatever it does, the run neither waits
nor ends for it."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.base.errors import MissingExtraError
from drumline.metrics.trackers import tracking
from drumline.metrics.trackers.mlflow import MLflow
from drumline.metrics.trackers.tracker import Outcome, Record, past_events, record_of
from drumline.metrics.trackers.tracking import Tracking, close_all, has_unfinished_tracker
from drumline.metrics.trackers.wandb import WeightsAndBiases
from drumline.runs.events import EventLog, Reporter

STEPS = {"epoch": 1, "lr": 0.1, "samples_per_s": 10.0, "data_share": 0.0, "seconds_left": 1.0}


class Remembers:
    """A tracker in memory, which may be told to fail or to hang."""

    name = "memory"
    keeps_past = False

    def __init__(self) -> None:
        self.points: list[tuple[str, int, Any]] = []
        self.opened: list[tuple[str, int]] = []
        self.outcome: Outcome | None = None
        self.had = -1
        self.before: Callable[[str], None] = lambda call: None

    def open(self, run: str, *, resume_step: int) -> str:
        self.opened.append((run, resume_step))
        self.before("open")
        return f"http://here/{run}"

    def has(self, name: str, step: int) -> bool:
        return step <= self.had

    def write(self, records: Sequence[Record]) -> None:
        self.before("write")
        for record in records:
            self.points += [(name, record.step, value) for name, value in record.values.items()]

    def close(self, outcome: Outcome) -> None:
        self.before("close")
        self.outcome = outcome

    def losses(self) -> list[int]:
        return [step for name, step, _ in self.points if name == "train/loss"]


class Tracked:
    """A reporter with a log and a tracker, as rank 0 of a run has them."""

    def __init__(self, folder: Path, tracker: Remembers) -> None:
        self.messages: list[tuple[str, str]] = []
        path = folder / "events" / "rank-00000.jsonl"
        self._log = EventLog(path)
        self.reporter = Reporter([self._log, self._hear], rank=0, host="a")
        ids = folder / "trackers" / "memory.json"
        self.sink = Tracking(
            tracker, folder=folder, event_file=path, id_file=ids, report=self.reporter.report
        )
        self.reporter.add(self.sink)

    def _hear(self, event: Any) -> None:
        if event["kind"] in ("note", "warning"):
            self.messages.append((event["kind"], event["message"]))

    def train(self, *steps: int) -> None:
        for step in steps:
            self.reporter.report("train", step=step, loss=step / 10, **STEPS)

    def close(self) -> list[str]:
        """The warnings."""
        close_all([self.sink])
        self._log.close()
        return [message for kind, message in self.messages if kind == "warning"]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """For trackers that hang: until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_what_a_tracker_gets_and_how_it_is_called(tmp_path: Path) -> None:
    stamp = {"time": 7.0, "number": 3, "rank": 0, "host": "a", "step": 5}
    train = record_of({**stamp, "kind": "train", "loss": 0.5, "grad_norm": 2, **STEPS}, tmp_path)
    assert train == Record(
        5,
        7.0,
        {
            f"train/{name}": value
            for name, value in {"loss": 0.5, "grad_norm": 2.0, **STEPS}.items()
        },
    )
    matrix = {"confusion": [[1.0, 2.0]], "samples": None, "other/accuracy": 0.9}
    evaluated = record_of({**stamp, "kind": "evaluation", **matrix}, tmp_path)
    assert evaluated.values == {"evaluation/other/accuracy": 0.9}
    logged = {**stamp, "kind": "logged", "name": "norm/first"}
    assert record_of({**logged, "type": "scalar", "value": 3}, tmp_path).values == {
        "norm/first": 3.0
    }
    assert record_of({**logged, "type": "text", "value": "3"}, tmp_path).values == {
        "norm/first": "3"
    }
    image = record_of({**logged, "type": "image", "path": "media/a.png"}, tmp_path)
    assert image.values == {"norm/first": tmp_path / "media" / "a.png"}
    elsewhere = record_of({**logged, "type": "image", "path": "../../.ssh/key"}, tmp_path)
    assert elsewhere.values == {"norm/first": tmp_path / "media" / "key"}
    assert not record_of({**stamp, "kind": "checkpoint", "seconds": 3.0}, tmp_path).values


def test_a_run_is_tracked_from_its_first_step_to_its_end(tmp_path: Path) -> None:
    tracker = Remembers()
    run = Tracked(tmp_path, tracker)
    run.reporter.report("start", total_steps=2)
    run.reporter.report("first_step", step=1, seconds=1.0)
    run.train(1, 2)
    run.reporter.report("evaluation", step=2, loss=0.3)
    run.reporter.report("end", step=2, metrics={"loss": 0.3})
    assert run.close() == []
    run_id = json.loads((tmp_path / "trackers" / "memory.json").read_text())["run"]
    assert run.messages == [("note", f"memory: http://here/{run_id}")]
    assert tracker.opened == [(run_id, 0)]
    assert tracker.losses() == [1, 2]
    assert tracker.points[-1] == ("evaluation/loss", 2, 0.3)
    assert tracker.outcome == "finished"
    assert not has_unfinished_tracker()


def test_an_id_that_somebody_else_wrote_is_not_sent_to_a_server(tmp_path: Path) -> None:
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "memory.json").write_text(json.dumps({"run": "' OR name != '"}))
    tracker = Remembers()
    run = Tracked(tmp_path, tracker)
    run.train(1)
    assert "in place of the id of a run; remove the file; training continues" in run.close()[0]
    assert tracker.opened == []


def test_nothing_is_tracked_of_a_start_that_is_refused(tmp_path: Path) -> None:
    tracker = Remembers()
    run = Tracked(tmp_path, tracker)
    run.reporter.report("start", total_steps=2)
    run.reporter.report("error", message="no")
    assert run.close() == []
    assert (tracker.opened, tracker.outcome) == ([], None)


@pytest.mark.parametrize(("kind", "outcome"), [("error", "failed"), ("preempted", "preempted")])
def test_a_tracker_is_told_how_the_run_ended(tmp_path: Path, kind: Any, outcome: Outcome) -> None:
    tracker = Remembers()
    run = Tracked(tmp_path, tracker)
    run.train(1)
    run.reporter.report(kind, message="")
    run.close()
    assert tracker.outcome == outcome


@pytest.mark.parametrize(
    ("had", "expected"), [(-1, [1, 2, 3, 4, 5, 6]), (2, [3, 4, 5, 6]), (5, [6])]
)
def test_a_resumed_run_continues_and_has_each_step_once(
    tmp_path: Path, had: int, expected: list[int]
) -> None:
    """The first start is killed after step 5, the second, which began at 3, after 4: steps 4 and 5
    are not its own."""
    first = Remembers()
    for resumed_at, steps in ((None, (1, 2, 3, 4, 5)), (3, (4,))):
        killed = Tracked(tmp_path, first)
        killed.reporter.report("start", total_steps=6)
        if resumed_at is not None:
            killed.reporter.report("resume", step=resumed_at, path="")
        killed.train(*steps)
        killed.close()
    tracker = Remembers()
    tracker.had = had
    run = Tracked(tmp_path, tracker)
    run.reporter.report("note", message="this start")
    run.reporter.report("start", total_steps=6)
    run.reporter.report("resume", step=4, path="")
    run.train(5, 6)
    assert run.close() == []
    assert {run for run, _ in first.opened + tracker.opened} == {first.opened[0][0]}, "one run"
    assert tracker.opened[0][1] == 4
    assert tracker.losses() == expected


def test_what_a_later_start_repeats_is_not_read_twice(tmp_path: Path) -> None:
    """The second start resumed from 5; the third from 3, as what was saved at 5 is corrupt."""
    path = tmp_path / "events.jsonl"
    with Reporter([EventLog(path)], rank=0, host="a") as reporter:
        for resumed_from, steps in ((None, (1, 2, 3, 4, 5)), (5, (6,)), (3, (4, 5))):
            reporter.report("start", step=0)
            if resumed_from is not None:
                reporter.report("resume", step=resumed_from)
            for step in steps:
                reporter.report("train", step=step, loss=0.1)
    assert [event["step"] for event in past_events(path)] == [1, 2, 3]


def test_a_start_from_the_first_step_repeats_all(tmp_path: Path) -> None:
    killed = Tracked(tmp_path, Remembers())
    killed.reporter.report("start", total_steps=6)
    killed.train(1, 2)
    killed.close()
    tracker = Remembers()
    run = Tracked(tmp_path, tracker)
    run.reporter.report("start", total_steps=6)
    run.train(1, 2)
    run.close()
    assert tracker.losses() == [1, 2]


def test_a_tracker_that_hangs_does_not_hold_the_run_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: threading.Event
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_S", 0.0)
    monkeypatch.setattr(tracking, "MAX_WAITING", 3)
    tracker = Remembers()
    is_stuck = threading.Event()

    def hang(call: str) -> None:
        if call == "write":
            is_stuck.set()
            release.wait()

    tracker.before = hang
    run = Tracked(tmp_path, tracker)
    run.train(1)
    is_stuck.wait()
    run.train(2, 3, 4, 5, 6)
    warnings = run.close()
    assert has_unfinished_tracker(), "so that the process exits without it"
    file = tmp_path / "events" / "rank-00000.jsonl"
    assert warnings == [
        f"memory is too slow: 3 events wait for it, and the next ones are dropped; {file} has everything",
        f"memory does not answer, and lacks 6 of 6 events of this run; {file} has everything",
    ]


def test_trackers_are_closed_side_by_side(tmp_path: Path) -> None:
    """Each ends only when the other does."""
    trackers = [Remembers(), Remembers()]
    barrier = threading.Barrier(2, timeout=30)

    def end_together(call: str) -> None:
        if call == "close":
            barrier.wait()

    runs = []
    for tracker in trackers:
        tracker.before = end_together
        runs.append(Tracked(tmp_path / str(len(runs)), tracker))
        runs[-1].train(1)
    close_all([run.sink for run in runs])
    assert [run.close() for run in runs] == [[], []]
    assert [tracker.outcome for tracker in trackers] == ["failed", "failed"]


def test_two_slow_trackers_have_one_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: threading.Event
) -> None:
    passed: list[float] = []

    def clock() -> float:
        """A third of the limit has passed whenever the thread that waits looks at it."""
        if threading.current_thread() is threading.main_thread():
            passed.append(tracking.MAX_CLOSE_S / 3)
        return sum(passed)

    def hang(call: str) -> None:
        if call == "write":
            are_stuck.wait()
            release.wait()

    are_stuck = threading.Barrier(3, timeout=30)
    monkeypatch.setattr(tracking, "CLOSE_S", math.inf)
    monkeypatch.setattr(tracking, "time", SimpleNamespace(monotonic=clock))
    runs = []
    for number in range(2):
        tracker = Remembers()
        tracker.before = hang
        runs.append(Tracked(tmp_path / str(number), tracker))
        runs[-1].train(1)
    are_stuck.wait()
    close_all([run.sink for run in runs])
    assert sum(passed) < 2 * tracking.MAX_CLOSE_S
    for run in runs:
        (warning,) = run.close()
        assert warning.startswith("memory does not answer, and lacks 1 of 1 events of this run; ")


def test_a_tracker_that_fails_is_warned_of_once_and_gets_the_rest(tmp_path: Path) -> None:
    tracker = Remembers()
    failed = []

    def fail(call: str) -> None:
        if call == "write" and len(failed) < 2:
            failed.append(threading.Event())
            failed[-1].set()
            raise ConnectionError("http://me:sec@ret@server:5000/api refused it\nand more")

    tracker.before = fail
    run = Tracked(tmp_path, tracker)
    for step in (1, 2, 3):
        run.train(step)
        while run.sink._busy_since is not None or run.sink._waiting:
            pass  # until the thread waits again: each step is a batch of its own
    warnings = run.close()
    assert tracker.losses() == [3]
    end = f"{tmp_path / 'events' / 'rank-00000.jsonl'} has everything"
    assert warnings == [
        f"memory failed: ConnectionError: http://***@server:5000/api refused it; training continues; {end}",
        f"memory lacks 2 of 3 events of this run; {end}",
    ]


def test_a_tracker_that_comes_late_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "RETRY_S", 0.01)
    tracker = Remembers()

    def refuse_twice(call: str) -> None:
        if call == "open" and len(tracker.opened) < 3:
            raise ConnectionError("refused")

    tracker.before = refuse_twice
    run = Tracked(tmp_path, tracker)
    run.train(1, 2)
    while len(tracker.opened) < 3:
        pass
    run.train(3)
    (warning,) = run.close()
    assert warning.startswith("memory failed: ConnectionError: refused; ")
    assert tracker.losses() == [1, 2, 3]


def test_a_tracker_that_never_comes_does_not_hold_the_end_up(tmp_path: Path) -> None:
    tracker = Remembers()

    def refuse(call: str) -> None:
        raise ConnectionError("refused")

    tracker.before = refuse
    run = Tracked(tmp_path, tracker)
    run.train(1, 2)
    warnings = run.close()
    assert len(tracker.opened) == 1
    assert [warning.partition(";")[0] for warning in warnings] == [
        "memory failed: ConnectionError: refused",
        "memory lacks 2 of 2 events of this run",
    ]


@pytest.mark.parametrize(("maker", "package"), [(WeightsAndBiases, "wandb"), (MLflow, "mlflow")])
def test_without_its_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: Any, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError) as caught:
        maker(tmp_path, {})
    start = f"--log.trackers {package} needs a package that is not installed\n  try: pip install '{package}"
    assert str(caught.value).startswith(start), (
        "it would ask an index for drumline, which no index has"
    )
