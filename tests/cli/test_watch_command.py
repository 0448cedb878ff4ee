"""`drumline watch` as a user types it, with a process that locks a run folder and writes a status
like a sidecar."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drumline.cli.watch_command import render
from drumline.cli.watch_command import run as follow
from drumline.watch.cluster_state import ClusterState, NodeState, RankState
from drumline.watch.heartbeat import Phase
from drumline.watch.run_status import FRESH_S, RESTART_S, RunStatusReader
from drumline.watch.status_file import STATUS_FILE, Notice, RunPace, status_record

ROOT = Path(__file__).parents[2]
# Holds the folder, and does what it is told: w(rite a status), e(nd with a word), q(uit).
JOB = """
import json, sys, time
from pathlib import Path
from drumline.runs.run_folder import RunFolder, locked
folder = RunFolder(Path(sys.argv[1]))
folder.make()
with locked(folder):
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, text = line.strip().partition(" ")
        if word == "write":
            (folder.path / "watch").mkdir(exist_ok=True)
            record = {**json.loads(text), "time": time.time()}
            (folder.path / "watch" / ".part").write_text(json.dumps(record))
            (folder.path / "watch" / ".part").replace(folder.path / "watch" / "status.json")
        elif word == "event":
            with folder.event_file(0).open("a") as file:
                file.write(json.dumps({**json.loads(text), "time": time.time()}) + chr(10))
        print("done", flush=True)
"""
STALL = Notice("stall", "stall: rank 1 on node-a is blocked. Try: wait")
HANG = Notice("hang", "hang: rank 1 on node-a is stopped by a signal. Try: kill -CONT")


def status(
    *, step: int = 812, stopped: bool = False, notices: tuple[Notice, ...] = (), ranks: int = 2
) -> dict[str, Any]:
    facts = [
        RankState(
            rank=rank,
            host="node-a",
            pid=1,
            step=step,
            phase=Phase.FORWARD,
            state="T" if stopped and rank == 1 else "R",
        )
        for rank in range(ranks)
    ]
    picture = ClusterState(me=0, nodes=(NodeState(node=0, host="node-a", ranks=tuple(facts)),))
    return status_record(
        picture,
        now=time.time(),
        world_size=ranks,
        hang_s=60,
        notices=notices,
        pace=RunPace({0: 2.5, 1: 2.5}, None),
    )


class Job:
    """The process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._heard()

    def does(self, word: str, record: Any = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word} {json.dumps(record)}\n")
        self.process.stdin.flush()
        self._heard()

    def leaves(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _heard(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline()


@contextmanager
def job(run: Path) -> Iterator[Job]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", JOB, str(run)], env=environment, **pipes
    ) as process:
        try:
            yield Job(process)
        finally:
            process.kill()


@pytest.fixture(name="environment")
def make_environment(tmp_path: Path) -> dict[str, str]:
    """In which to import torch is an error."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    return {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "TERM": "xterm",
        "COLUMNS": "100",
    }


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "drumline", "watch", *words]


def watch(environment: dict[str, str], *words: str) -> tuple[int, str]:
    result = subprocess.run(
        command(*words), env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    return result.returncode, result.stdout + result.stderr


def test_one_look_and_its_exit_code(tmp_path: Path, environment: dict[str, str]) -> None:
    run = tmp_path / "run"
    with job(run) as at_work:
        code, said = watch(environment, str(run), "--once")
        assert code == 1
        assert (
            f" is training in {run} without a watchdog: it has just started, it has one rank"
            in said
        )
        at_work.does("write", status())
        assert watch(environment, str(run), "--once", "--running")[0] == 0
        assert watch(environment, str(run), "--once") == (
            0,
            "step 812, 2.5 steps/s: 2 ranks on 1 host\n"
            "  host    rank  step  phase    for   steps/s  state\n"
            "  node-a  0     812   forward  0 ms  2.5      trains\n"
            "  node-a  1     812   forward  0 ms  2.5      trains\n",
        )
        at_work.does("write", status(stopped=True, notices=(STALL,)))
        code, said = watch(environment, "--once", "--json", str(run))
        record = json.loads(said)
        assert (code, record["has_ended"], record["message"]) == (1, False, None)
        assert [row["state"] for row in record["rows"]] == ["trains", "stopped by a signal"]
        assert record["status"]["notices"] == [asdict(STALL)]
        at_work.does("event", {"kind": "end", "step": 900})
        at_work.leaves()
    code, said = watch(environment, str(run), "--once")
    assert code == 0
    assert said.endswith("the run has ended: done at step 900\n")
    assert watch(environment, str(run), "--once", "--running") == (1, said)
    ours, theirs = os.pipe()
    os.close(ours)  # as `| head` does when it has seen enough
    with os.fdopen(theirs, "wb") as closed:
        ended = subprocess.run(
            command(str(run)),
            env=environment,
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_it_follows_to_the_end_in_lines_and_on_a_terminal(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    run = tmp_path / "run"
    with job(run) as at_work:
        at_work.does("write", status())
        ours, theirs = pty.openpty()
        followers = [
            subprocess.Popen(
                command(str(run), "--every", "0.1"),
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            for out in (theirs, subprocess.PIPE)
        ]
        os.close(theirs)
        lines = followers[1].stdout
        assert lines is not None
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d step 812, 2.5 steps/s: 2 ranks on 1 host\n", lines.readline().decode()
        )
        output = ""
        while "trains" not in output:
            output += os.read(ours, 1 << 16).decode()
        at_work.does("write", status(step=815, stopped=True, notices=(STALL,)))
        while "815" not in output or "stall: rank 1" not in output:
            output += os.read(ours, 1 << 16).decode()
        assert re.search("\x1b\\[1;31m[^\n]*stopped by a signal", output)
        told = ""
        # the other one may look later, but before the end
        while "stopped by a signal" not in told:
            told += lines.readline().decode()
        at_work.does("event", {"kind": "preempted", "step": 815})
        at_work.leaves()
        with suppress(OSError):  # that is how the end of a terminal reads
            while True:
                output += os.read(ours, 1 << 16).decode()
        rest = told + lines.read().decode()
        lines.close()
        os.close(ours)
    assert [follower.wait() for follower in followers] == [0, 0]
    assert rest.count(STALL.message) == 1  # a notice is shown once
    assert "  node-a  1     815   forward  0 ms  2.5      stopped by a signal\n" in rest
    assert rest.endswith(" the run has ended: preempted, saved step 815\n")


def write(run: Path, record: dict[str, Any], *, age_s: float = 0.0) -> None:
    (run / STATUS_FILE).parent.mkdir(parents=True, exist_ok=True)
    (run / STATUS_FILE).write_text(json.dumps({**record, "time": time.time() - age_s}))


def event(run: Path, kind: str, *, age_s: float) -> None:
    (run / "events").mkdir(exist_ok=True)
    record = {"kind": kind, "step": 7, "message": "ValueError: no", "time": time.time() - age_s}
    (run / "events" / "rank-00000.jsonl").write_text(json.dumps(record) + "\n")


def test_what_a_mirror_reports_late_does_not_hide_the_end(tmp_path: Path) -> None:
    event(tmp_path, "end", age_s=5)
    log = tmp_path / "events" / "rank-00000.jsonl"
    late = {"kind": "mirrored", "newest": 7, "number": 9, "step": 7, "time": time.time()}
    log.write_text(log.read_text() + json.dumps(late) + "\n")
    assert RunStatusReader(tmp_path).read().state == "done"


def test_a_command_that_was_refused_leaves_a_finished_run_done(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    refusal = {"kind": "error", "number": 0, "time": time.time(), "step": 0}
    finished = [
        {"kind": "end", "number": 8, "time": time.time(), "step": 46},
        {"kind": "warning", "number": 9, "time": time.time()},
    ]
    states = {}
    for name, records in {
        "refused": [*finished, refusal, refusal],
        "crashed": [*finished, {**refusal, "number": 4}],
        "never began": [refusal],
        "warned, then refused": [
            *finished,
            {"kind": "warning", "number": 0, "time": time.time()},
            {**refusal, "number": 1},
        ],
        "preempted, then refused": [{**finished[0], "kind": "preempted"}, refusal],
    }.items():
        lines = "".join(
            json.dumps({"rank": 0, **record, "message": "wrong"}) + "\n" for record in records
        )
        (tmp_path / "events" / "rank-00000.jsonl").write_text(lines)
        states[name] = RunStatusReader(tmp_path).read().state
    assert states == {
        "refused": "done",
        "crashed": "failed",
        "never began": "failed",
        "warned, then refused": "done",
        "preempted, then refused": "preempted",
    }


def test_the_status_of_a_command_that_was_refused_is_no_job_that_restarts(tmp_path: Path) -> None:
    write(tmp_path, status(), age_s=FRESH_S + 5)
    now = time.time()
    events = [
        {"kind": "end", "number": 8, "time": now - 3 * FRESH_S},
        {"kind": "error", "number": 0, "time": now - FRESH_S - 5},
    ]
    (tmp_path / "events").mkdir()
    lines = "".join(json.dumps({"rank": 0, "message": "wrong", **event}) + "\n" for event in events)
    (tmp_path / "events" / "rank-00000.jsonl").write_text(lines)
    assert RunStatusReader(tmp_path).read().state == "done"


def test_what_is_shown_when_there_is_nothing_to_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, status(), age_s=FRESH_S + 5)
    look = RunStatusReader(tmp_path).read()
    assert (look.is_live, look.has_ended) == (False, False)
    assert (
        look.message()
        == f"the status is 15 s old and no job is in {tmp_path}: it may be about to restart"
    )
    event(tmp_path, "error", age_s=FRESH_S + 5)  # a launcher may start it again
    assert not RunStatusReader(tmp_path).read().has_ended
    write(tmp_path, status(), age_s=RESTART_S + 5)
    assert (
        RunStatusReader(tmp_path).read().message()
        == "the run has ended: failed at step 7: ValueError: no"
    )
    event(tmp_path, "train", age_s=0)
    assert RunStatusReader(tmp_path).read().message() == (
        "the run has ended, or continues where this machine cannot see it: its status is 65 s old"
    )
    write(tmp_path, status(notices=(STALL, HANG)), age_s=RESTART_S + 5)
    assert follow([str(tmp_path)]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert (first[len("00:00:00 ") :], second) == (STALL.message, HANG.message)
    assert (
        last
        == "the run has ended, or continues where this machine cannot see it: its status is 65 s old"
    )
    write(tmp_path, {**status(), "has_ended": True})
    assert RunStatusReader(tmp_path).read().message() == "the run has ended"
    write(tmp_path, status())
    event(tmp_path, "preempted", age_s=100)  # of the attempt before
    assert RunStatusReader(tmp_path).read().is_live
    with job(tmp_path):
        write(tmp_path, status(), age_s=99)
        words = RunStatusReader(tmp_path).read().message()
        assert words is not None
        assert re.fullmatch(
            r"the status is 99 s old, though process \d+ on \S+ is in \S+: the sidecar on node-a has exited, or "
            "the storage of the run folder hangs",
            words,
        )
        reader = RunStatusReader(tmp_path)  # on a machine whose clock is ahead
        assert not reader.read().is_live
        write(tmp_path, status(), age_s=98)
        assert reader.read().is_live


def test_the_table_is_never_higher_than_the_terminal(tmp_path: Path) -> None:
    shown = tuple(Notice("stall", f"stall: {number} " + "word " * 60) for number in range(5))
    for ranks, height in ((2, 24), (256, 24), (256, 8), (40, 50)):
        write(tmp_path, status(ranks=ranks, stopped=True, notices=shown))
        console = Console(width=80, height=height, force_terminal=True, color_system=None)
        with console.capture() as drawn:
            console.print(render(RunStatusReader(tmp_path).read(), width=80, height=height))
        lines = drawn.get().splitlines()
        assert len(lines) < height
        assert sum("stopped by a signal" in line for line in lines) == 1
        assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "no RUN was given\n  try: give a run folder, as in: drumline watch runs/digits"),
        (["a", "b"], "'b': unexpected argument"),
        (
            ["a", "--forever"],
            "--forever: unknown flag; did you mean '--every'?\n  try: read drumline watch --help",
        ),
        (["a", "--every", "soon"], "--every: 'soon' is not a number"),
        (["a", "--every=0"], "--every: 0.0 must be between 0.1 and 86400"),
        (["a", "--every"], "--every: the value is missing (number between 0.1 and 86400)"),
        (["nowhere"], "there is no run folder nowhere"),
    ],
)
def test_what_is_wrong_with_the_command(
    words: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from drumline.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["watch", *words]) == 2
    assert problem in capsys.readouterr().err


def test_nothing_was_ever_watched_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from drumline.cli import main

    (tmp_path / "checkpoints").mkdir()
    nobody = f"no job is training in {tmp_path}, as far as this machine can see, and it never had a watchdog\n"
    for words in (["--once"], []):
        assert main(["watch", str(tmp_path), *words]) == 1
        assert capsys.readouterr().out.endswith(nobody)
