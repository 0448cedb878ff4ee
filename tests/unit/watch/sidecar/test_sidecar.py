"""A sidecar and real processes with heartbeats like ranks: what it reports, what it kills, and when
it exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.watch.watch_folder import read_ending

# Ranks in step with each other: nobody is more than a step ahead. They end when a file says so.
RANK = """
import os, sys, time
from pathlib import Path
from drumline.watch.heartbeat import Phase, read_heartbeat
from drumline.rank.watched.watched_rank import watch_script

watched = watch_script(os.environ)
heartbeat, rank, done = watched.heartbeat, watched.rank, Path(sys.argv[1])
peers = [watched.folder / f"rank-{other:05d}.heartbeat" for other in range(2) if other != rank]
step = 0
while not done.exists():
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD):
        heartbeat.mark(phase)
        time.sleep(0.005)
    while any((other := read_heartbeat(peer)) is None or other.step < step for peer in peers) and not done.exists():
        time.sleep(0.002)
    heartbeat.mark(Phase.OPTIMIZER)
    step += 1
    heartbeat.begin_step(step)
heartbeat.mark(Phase.LEFT)
watched.close()
"""


class Run:
    """Two such ranks on this machine, and the sidecar that the first has started."""

    def __init__(self, folder: Path, on_hang: str) -> None:
        self.watch = folder / "watch"
        self.folder = folder / "run"
        self.done = folder / "done"
        self.watch.mkdir(mode=0o700)
        self.folder.mkdir()
        self.screen = folder / "screen"
        with self.screen.open("wb") as screen:
            self.ranks = [self._start(rank, on_hang, screen) for rank in range(2)]
        wait_for(lambda: self.status() is not None and self.step() > 20)

    def _start(self, rank: int, on_hang: str, screen: Any) -> subprocess.Popen[bytes]:
        script_watch = {"run": str(self.folder), "on_hang": on_hang, "hang_s": 60}
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        variables = {
            "DRUMLINE_WATCH_DIR": str(self.watch),
            "DRUMLINE_SCRIPT_WATCH": json.dumps(script_watch),
            **{name: str(value) for name, value in place.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }
        command = [sys.executable, "-c", RANK, str(self.done)]
        return subprocess.Popen(command, env={**os.environ, **variables}, stderr=screen)

    def status(self) -> dict[str, Any] | None:
        try:
            return dict(json.loads((self.folder / "watch" / "status.json").read_text()))
        except (OSError, ValueError):
            return None

    def step(self) -> int:
        status = self.status()
        return min((row["step"] for row in status["ranks"]), default=0) if status else 0

    def sidecar(self) -> int:
        return int((self.watch / "sidecar.pid").read_text())

    def said(self) -> str:
        return self.screen.read_text()

    def end(self) -> list[int]:
        """In order; the ranks' exit codes."""
        self.done.touch()
        codes = [rank.wait(timeout=20) for rank in self.ranks]
        wait_for(lambda: not is_alive(self.sidecar()))
        return codes


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    started_run = Run(tmp_path, getattr(request, "param", "restart"))
    yield started_run
    started_run.done.touch()
    for rank in started_run.ranks:
        rank.send_signal(signal.SIGCONT)
        rank.kill()
        rank.wait()
    wait_for(lambda: not is_alive(started_run.sidecar()))


@pytest.mark.slow
def test_a_healthy_run_gets_no_message_about_its_sidecar_not_even_when_that_dies(run: Run) -> None:
    first = run.sidecar()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: run.sidecar() != first)
    step = run.step()
    wait_for(lambda: run.step() > step + 20)
    second = run.sidecar()
    assert run.end() == [0, 0]
    assert run.said() == ""
    assert not is_alive(second)
    status = run.status()
    assert status is not None
    assert status["has_ended"]
    assert not (run.folder / "diagnoses").exists()


def test_a_stopped_rank_is_named_and_the_run_is_ended_by_the_next_sidecar_too(run: Run) -> None:
    os.kill(run.ranks[1].pid, signal.SIGSTOP)
    os.kill(run.sidecar(), signal.SIGKILL)
    assert [rank.wait(timeout=60) for rank in run.ranks] == [-signal.SIGKILL] * 2
    wait_for(lambda: not is_alive(run.sidecar()))
    (line,) = run.said().splitlines()
    assert line.startswith("drumline: hang: rank 1 on ")
    assert "is stopped by a signal" in line
    assert f"kill -CONT {run.ranks[1].pid}" in line
    ruling = json.loads((run.watch / "diagnosis.json").read_text())
    assert (ruling["alarm"], ruling["action"], ruling["was_printed"]) == ("hang", "restart", True)
    ending = read_ending(run.watch)
    assert ending is not None
    assert (ending.by, ending.grace_s, ending.why) == ("watchdog", 0.0, ruling["what"])
    (event,) = map(json.loads, (run.folder / "events" / "watch.jsonl").read_text().splitlines())
    assert (event["kind"], event["rank"], event["cause"], event["number"]) == (
        "hang",
        1,
        "stopped",
        0,
    )
    assert f"drumline: {event['message']}" == line
    (page,) = (run.folder / "diagnoses").glob("*.txt")
    assert page.read_text().startswith(event["message"].partition(". Next")[0])
    status = run.status()
    assert status is not None
    assert status["notices"] == [{"kind": event["kind"], "message": event["message"]}]
    assert not status["has_ended"], "its launcher may start it again"


@pytest.mark.parametrize("run", ["report"], indirect=True)
def test_what_is_only_reported_may_continue(run: Run) -> None:
    os.kill(run.ranks[0].pid, signal.SIGSTOP)
    wait_for(lambda: "hang: rank 0 on " in run.said())
    os.kill(run.ranks[0].pid, signal.SIGCONT)
    wait_for(lambda: "the run continues after " in run.said())
    assert run.end() == [0, 0]
    assert len(run.said().splitlines()) == 2


def test_a_killed_rank_is_named_with_its_signal_and_its_step(run: Run) -> None:
    run.ranks[1].kill()
    run.ranks[1].wait()
    (run.watch / "exit-00001").write_text("-9\n")  # as our launcher does
    wait_for(lambda: "failure: rank 1 on " in run.said())
    run.done.touch()
    assert run.ranks[0].wait(timeout=20) == 0  # a failure is the launcher's business
    (line,) = run.said().splitlines()
    assert "SIGKILL" in line
    assert "step" in line
    furthest_step = int((run.watch / "furthest-step").read_text())
    assert furthest_step >= int(line.partition("at step ")[2].partition(",")[0]), "for the launcher"
