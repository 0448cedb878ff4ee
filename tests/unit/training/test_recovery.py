"""What a restarted run makes of the diagnoses before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.metrics.display import event_line
from drumline.runs.events import Event, Reporter
from drumline.runs.run_folder import RunFolder
from drumline.training import resume
from drumline.training.resume import look_back, report_recovery


class Run:
    """A run folder, and who writes diagnoses into it."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.folder.diagnoses.mkdir()
        self.count = 0

    def start(self, *, is_restart: bool = True) -> tuple[Any, Any]:
        failure = look_back(self.folder, is_restart=is_restart)
        return failure["refusal"], failure["failure"]

    def launch(self) -> str:
        return str(json.loads(self.folder.launch_file.read_text())["launch"])

    def diagnose(
        self, step: int | None, alarm: str = "hang", action: str = "restart", **diagnosis: Any
    ) -> None:
        self.count += 1
        about = {
            "cause": "killed",
            "rank": 1,
            "host": "b",
            "step": step,
            "what": "gone",
            **diagnosis,
        }
        about |= {"next_step": "look", "is_certain": True, "since_s": 2.5}
        record = {
            "launch": self.launch(),
            "alarm": alarm,
            "sentence": "",
            "action": action,
            "time": 107.5,
        }
        file = self.folder.diagnoses / f"{self.count:04d}-killed.json"
        file.write_text(json.dumps({**record, "diagnosis": about}))


@pytest.fixture(name="run")
def make_run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    assert run.start(is_restart=False) == (None, None)
    return run


def test_three_times_the_same_step_is_enough(run: Run) -> None:
    first = run.launch()
    run.diagnose(57, alarm="failure")
    refusal, failure = run.start()
    assert refusal is None
    assert failure == {
        "cause": "killed",
        "rank": 1,
        "host": "b",
        "step": 57,
        "failed_at": 105.0,
        "diagnosed_at": 107.5,
    }
    run.diagnose(60, rank=2)
    # after a cut each side has a alarm for it; it was one start that ended
    run.diagnose(57, rank=3)
    assert run.start()[1]["rank"] == 2
    run.diagnose(57, cause="unreachable", rank=None, what="b does not answer")
    run.diagnose(57, what="the other side of it")
    assert run.start()[0] is None
    assert run.start() == (None, None), "what was told before is not new"
    run.diagnose(57, host="c", cause="dataset", what="stuck in __getitem__")
    assert run.launch() == first
    refusal, _ = run.start()
    assert refusal == (
        "the run has failed 3 times at step 57 and is not restarted:\n"
        "  - gone\n"
        "  - b does not answer\n"
        "  - stuck in __getitem__",
        f"read {run.folder.diagnoses} and fix the cause, then rerun the same command to resume from the newest "
        "checkpoint",
    )
    run.diagnose(None, alarm="failure", cause="exception", what="the refusal, as a sidecar sees it")
    assert tuple(run.start()[0]) == refusal, "under torchrun, which starts it again all the same"
    assert run.start(is_restart=False) == (None, None), "a new launch begins to count anew"
    assert run.launch() != first


def test_what_was_only_told_or_has_no_step_does_not_count(run: Run) -> None:
    for _ in range(4):
        run.diagnose(3, alarm="stall")
        run.diagnose(3, action="report")
        run.diagnose(None)
        refusal, failure = run.start()
        assert refusal is None
        assert failure["step"] is None
    run.diagnose(8, action="stop")
    refusal, _ = run.start()
    assert refusal[0] == "the run was stopped at step 8 and is not restarted: gone"
    run.diagnose(None, alarm="failure")
    assert tuple(run.start()[0]) == refusal


def test_a_kill_of_our_own_is_not_the_cause_and_counts_as_no_failure(run: Run) -> None:
    for _ in range(4):
        run.diagnose(8, alarm="failure", cause="ended")
        refusal, failure = run.start()
        assert refusal is None
        assert failure["cause"] == "ended", "nothing else is known"
    run.diagnose(8, alarm="failure", cause="ended")
    run.diagnose(8, cause="unreachable", rank=None)
    assert run.start()[1]["cause"] == "unreachable"


def test_a_launch_file_that_was_lost_or_incomplete_is_a_new_launch(run: Run) -> None:
    run.diagnose(5)
    for text in ("", "{}", "[1]"):
        run.folder.launch_file.write_text(text)
        assert run.start() == (None, None)
    run.folder.launch_file.unlink()
    assert run.start() == (None, None)


@pytest.mark.parametrize(
    ("fault_step", "rank", "cause", "words"),
    [
        (57, 1, "killed", "resumed 12 s after rank 1 on b was killed at step 57; 7 steps lost"),
        (51, 1, "gil", "resumed 12 s after rank 1 on b was blocked with the GIL held at step 51; 1 step lost"),
        (50, None, "unreachable", "resumed 12 s after b was unreachable at step 50; no step lost"),
        (None, 0, "exception", "resumed 12 s after rank 0 on b crashed"),
    ],
)  # fmt: skip
def test_the_time_from_fault_to_step_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    fault_step: int | None,
    rank: int | None,
    cause: str,
    words: str,
) -> None:
    events: list[Event] = []
    monkeypatch.setattr(resume.time, "time", lambda: 112.0)
    failure = {
        "cause": cause,
        "rank": rank,
        "host": "b",
        "step": fault_step,
        "failed_at": 100.0,
        "diagnosed_at": 103.0,
    }
    with Reporter([events.append], rank=0, host="a") as reporter:
        report_recovery(failure, reporter, step=51)
    (event,) = events
    assert (event["kind"], event["step"], event["seconds"], event["seconds_to_diagnosis"]) == (
        "recovered",
        51,
        12.0,
        3.0,
    )
    assert event["lost_steps"] == (None if fault_step is None else fault_step - 50)
    assert (event["about_rank"], event["about_host"], event["cause"]) == (rank, "b", cause)
    assert event_line(event) == words
