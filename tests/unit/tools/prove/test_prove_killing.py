"""Legs are killed when they should be, and nothing that they started is left. The runs here only
pretend: no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drumline.base import processes
from drumline.base.errors import ExitCode
from drumline.base.processes import descendants
from drumline.tools.prove import killed_run
from drumline.tools.prove.killed_run import (
    JobProcesses,
    Leg,
    LegProgress,
    RunFailedError,
    Tail,
    describe,
    failed,
    run_and_kill,
    run_to_the_end,
)
from drumline.tools.prove.proof_plan import Kill, Moment
from tests.conftest import child_processes, children_that_stay

PRETENDER = """
import json, os, subprocess, sys, time
from pathlib import Path

folder, what = Path(sys.argv[1]), sys.argv[2]
(folder / "trace").mkdir(parents=True)
(folder / "checkpoints").mkdir(exist_ok=True)
trace = (folder / "trace" / "rank-00000.jsonl").open("a", buffering=1)

def say(kind, step, **more):
    print(json.dumps({"kind": kind, "step": step, **more}), file=trace)

if what == "workers":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
if what == "again":
    time.sleep(0.1)
say("start", 0, pid=os.getpid())
for step in range(4 if what == "again" else 1, 7):
    pause = 0.5 if step == 4 else 0.01
    if what == "error" and step == 3:
        print("something went wrong")
        sys.exit(3)
    say("step", step)
    time.sleep(0.1 if what == "again" else 0)
    partial = folder / "checkpoints" / f".step-{step:08d}.partial"
    if partial.exists():
        partial.rmdir()
    partial.mkdir()
    time.sleep(pause)
    partial.rename(folder / "checkpoints" / f"step-{step:08d}")
    say("evaluation", step)
    time.sleep(pause)
    say("evaluated", step)
if what == "stays":
    time.sleep(60)
"""


class Pretended(Leg):
    """A leg that runs the script above instead of a job."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", PRETENDER, str(self.folder), *self.arguments]


def leg(folder: Path, what: str = "plain") -> Leg:
    return Pretended("leg 1", (what,), folder / "run", folder / "leg-1.log", 1)


def kill(moment: Moment, step: int, *, wait: float = 0.1) -> Kill:
    return Kill(moment, step, (0,), wait, None if moment == "step" else 0.05)


def last(folder: Path) -> tuple[str, int]:
    line = Tail(folder / "run" / "trace" / "rank-00000.jsonl").new()[-1]
    return line["kind"], line["step"]


def test_a_leg_runs_to_its_end(tmp_path: Path) -> None:
    run_to_the_end(leg(tmp_path))
    assert last(tmp_path) == ("evaluated", 6)


def test_killed_after_a_step(tmp_path: Path) -> None:
    assert run_and_kill(leg(tmp_path), kill("step", 4))
    assert last(tmp_path) == ("step", 4)


def test_killed_during_a_save(tmp_path: Path) -> None:
    assert run_and_kill(leg(tmp_path), kill("save", 4))
    assert (tmp_path / "run" / "checkpoints" / ".step-00000004.partial").exists()


def test_killed_during_an_evaluation(tmp_path: Path) -> None:
    assert run_and_kill(leg(tmp_path), kill("evaluation", 4))
    assert last(tmp_path) == ("evaluation", 4)


@pytest.mark.parametrize("moment", ["save", "evaluation"])
def test_a_moment_that_has_passed_is_no_kill_in_it(tmp_path: Path, moment: Moment) -> None:
    assert not run_and_kill(leg(tmp_path), kill(moment, 4, wait=15))


@pytest.mark.parametrize("moment", ["step", "save", "evaluation"])
def test_a_run_that_ends_before_is_not_killed(tmp_path: Path, moment: Moment) -> None:
    assert not run_and_kill(leg(tmp_path), kill(moment, 7))


def test_a_leg_that_fails_by_itself_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    for run in (run_to_the_end, lambda one: run_and_kill(one, kill("step", 5))):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        with pytest.raises(RunFailedError) as caught:
            run(leg(folder, "error"))
        assert str(caught.value).startswith(
            "leg 1 failed by itself with exit code 3:\n  | something went wrong\n"
        )
        assert f"its full output is in {folder / 'leg-1.log'}" in str(caught.value)
        assert caught.value.exit_code == ExitCode.PREFLIGHT_FAILED


def test_workers_of_a_killed_rank_do_not_outlive_it(tmp_path: Path) -> None:
    before = child_processes()
    assert run_and_kill(leg(tmp_path, "workers"), kill("step", 1))
    assert not children_that_stay(before)


def test_a_leg_that_hangs_after_the_kill_is_ended_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(killed_run, "END_S", 0.2)
    monkeypatch.setattr(JobProcesses, "kill", lambda family, pids: None)
    with pytest.raises(
        RunFailedError, match=r"leg 1 did not end within 0 s after rank 0 was killed"
    ):
        run_and_kill(leg(tmp_path, "stays"), kill("step", 1))
    assert last(tmp_path)[0] != "start"


@pytest.mark.soak
def test_an_error_in_between_ends_everything(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)"
    parent = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {stubborn + '; time.sleep(60)'!r}])"
        "; time.sleep(60)"
    )
    log = tmp_path / "log"

    def fail() -> None:
        with JobProcesses([sys.executable, "-c", parent], log=log):
            while "up" not in log.read_text():
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    # the guard around every test looks for what is left


def test_descendants_are_found_at_any_depth() -> None:
    child = subprocess.Popen(["sh", "-c", "sh -c 'sleep 30; true'; true"])
    try:
        deadline = time.monotonic() + 10
        while len(descendants(child.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        pids = descendants(child.pid)
        assert len(pids) == 2
    finally:
        for pid in (child.pid, *(descendants(child.pid))):
            subprocess.run(["kill", "-9", str(pid)], check=False)
        child.wait()


def test_a_line_is_handed_out_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = Tail(file)
    assert tail.new() == []
    file.write_text('{"a": 1}\n{"a"')
    assert tail.new() == [{"a": 1}]
    file.write_text('{"a": 1}\n{"a": 2}\n')
    assert (tail.new(), tail.new()) == ([{"a": 2}], [])


def test_a_kill_is_described() -> None:
    assert describe(kill("step", 3), 4) == "killed with -9 after step 4 (rank 0)"
    save = Kill("save", 4, (0, 1), 0, 1)
    assert describe(save, 4) == "killed with -9 during the save of step 4 (ranks 0, 1)"
    evaluation = kill("evaluation", 5)
    assert describe(evaluation, 5) == "killed with -9 during the evaluation after step 5 (rank 0)"


def test_a_save_has_begun_when_its_folder_is_there(tmp_path: Path) -> None:
    stopped_leg = leg(tmp_path)
    planned_kill = kill("save", 4)
    partial = stopped_leg.folder / "checkpoints" / ".step-00000004.partial"
    partial.parent.mkdir(parents=True)
    watch = LegProgress(stopped_leg)
    assert not watch.has_begun(planned_kill), "no rank has begun"
    (stopped_leg.folder / "trace").mkdir()
    trace = stopped_leg.folder / "trace" / "rank-00000.jsonl"
    trace.write_text('{"kind": "start", "step": 2, "pid": 1}\n{"kind": "step", "step": 4}\n')
    assert not watch.has_begun(planned_kill), "the save of this leg has not begun"
    partial.mkdir()
    assert watch.has_begun(planned_kill)


def test_a_leg_is_not_killed_before_there_is_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    stopped_leg = leg(tmp_path)
    planned_kill = kill("step", 3)
    (stopped_leg.folder / "trace").mkdir(parents=True)
    (stopped_leg.folder / "trace" / "rank-00000.jsonl").write_text('{"kind": "step", "step": 3}\n')
    partial = stopped_leg.folder / "checkpoints" / ".step-00000002.partial"
    partial.mkdir(parents=True)
    watch = LegProgress(stopped_leg)
    assert not watch.has_begun(planned_kill), "the save of step 2 is still being written"
    partial.rename(partial.with_name("step-00000002"))
    assert watch.has_begun(planned_kill)


def test_two_legs_are_killed_in_the_same_save(tmp_path: Path) -> None:
    planned_kill = kill("save", 4)
    for _ in range(2):
        assert run_and_kill(leg(tmp_path, "again"), planned_kill)
        assert last(tmp_path) == ("step", 4)
        shutil.rmtree(tmp_path / "run" / "trace")


def test_ranks_are_killed_once_all_of_them_have_begun(tmp_path: Path) -> None:
    stopped_leg = leg(tmp_path)
    (stopped_leg.folder / "trace").mkdir(parents=True)
    for rank, text in enumerate(['{"kind": "start", "step": 0, "pid": 7}\n', '{"kind": "sta']):
        (stopped_leg.folder / "trace" / f"rank-{rank:05d}.jsonl").write_text(text)
    assert LegProgress(stopped_leg).pids_of((0, 1, 2)) == [7]


def test_the_advice_of_a_run_that_was_refused_is_handed_on(tmp_path: Path) -> None:
    stopped_leg = leg(tmp_path)
    stopped_leg.log.write_text(
        "drumline: error: 8 ranks cannot share 4 shards\n  try: start at most 4 ranks\n"
    )
    for code in (2, 3):
        assert f"\n  try: do what it says; its full output is in {stopped_leg.log}" in str(
            failed(stopped_leg, code)
        )
    assert "try: fix the job first; its" in str(failed(stopped_leg, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="it is the kernel of Linux that is asked")
def test_what_was_started_does_not_outlive_a_kill(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(60)",
    ]
    starter = (
        "import subprocess; from drumline.base.processes import ending_with_parent; "
        f"subprocess.run(ending_with_parent({command!r}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_whose_starter_is_gone_does_not_begin() -> None:
    command = [sys.executable, processes.__file__, "1", sys.executable, "-c", "print('begun')"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (143, "")
