"""A node's supervisor over its own pipes: one attempt, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from drumline.base.processes import parent_of
from drumline.launch.hosts import Host
from drumline.launch.node.guard import job_processes
from drumline.launch.node_plan import NodePlan, Program, nodes_of_hosts
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.net.frames import encode

ROOT = Path(__file__).parents[3]
# As the controller starts it; but nobody sends heartbeats.
START = """
import sys, drumline.launch.ssh.supervisor as it
it.LEASE_S = 600.0
sys.exit(it.main())
"""
RANK = """
import os, time
print("rank", os.getpid(), os.environ["DRUMLINE_JOB"], os.environ.get("DRUMLINE_RESTARTED"), flush=True)
time.sleep(1000)
"""


class SupervisorProcess:
    """One host's supervisor, and this test as its controller."""

    def __init__(self, folder: Path) -> None:
        (folder / "rank.py").write_text(RANK)
        self.process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        hosts = [Host("here")]
        self.job = HostsJob(
            job=f"test-{os.getpid()}-{time.monotonic_ns()}",
            hosts=hosts,
            nodes=nodes_of_hosts(hosts, 29500, [NodePlan(max_restarts=3)] * len(hosts)),
            program=Program(("rank.py",)),
            client=[],
            python=sys.executable,
            cwd=folder,
            logs=folder / "logs",
            grace_s=1,
        )

    def send(self, frame: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(encode(frame) + b"\n")
        self.process.stdin.flush()

    def hear(
        self, kind: str, is_expected: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            frame: dict[str, Any] = json.loads(line)
            if frame["kind"] == kind and is_expected(frame):
                return frame
        raise AssertionError(f"no {kind}")

    def start(self) -> tuple[int, list[str]]:
        """The attempt, to its first rank: its agent, and what the rank says."""
        self.send(self.job.spec(self.job.nodes[0]))
        self.hear("hello")
        self.send({"kind": "start", "node": asdict(self.job.nodes[0])})
        frame = self.hear("lines", lambda frame: frame["stream"] == "out")
        _, rank, *facts = frame["lines"][0].split()
        return parent_of(int(rank)), facts

    def is_anyone_left(self) -> bool:
        return bool(job_processes(self.job.job))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(name="node")
def _node(tmp_path: Path) -> Iterator[SupervisorProcess]:
    node = SupervisorProcess(tmp_path)
    assert node.process.stdin
    assert node.process.stdout
    yield node
    node.process.stdin.close()
    node.process.wait(30)
    node.process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stdin", "killed", "signalled"])
def test_all_end_with_the_supervisor(node: SupervisorProcess, end: str) -> None:
    _, facts = node.start()
    assert facts == [node.job.job, "None"]
    if end == "stdin":
        assert node.process.stdin
        node.process.stdin.close()  # the controller is gone
    elif end == "killed":
        node.process.kill()
    else:
        node.process.terminate()  # its host may be shutting down
        node.hear("ended")
    assert node.process.wait(30) == (-signal.SIGKILL if end == "killed" else 0)
    wait_until(lambda: not node.is_anyone_left())


@pytest.mark.slow
def test_the_ranks_of_an_agent_that_was_killed_end_with_it(node: SupervisorProcess) -> None:
    agent, _ = node.start()
    os.kill(agent, signal.SIGKILL)
    assert node.hear("ended")["code"] == -signal.SIGKILL
    assert not job_processes(node.job.job)
    assert node.process.wait(30) == 0, "it runs one attempt"


RENUMBERED = """
import os, time
from pathlib import Path
from drumline.base.rank_environment import write_rank
print("before", flush=True)
while not Path("go").exists():
    time.sleep(0.02)
write_rank(os.environ, 7)
time.sleep(0.5)
print("after", flush=True)
"""


@pytest.mark.slow
def test_lines_are_marked_with_the_rank_that_a_process_is_now(
    node: SupervisorProcess, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(RENUMBERED)
    node.send(node.job.spec(node.job.nodes[0]))
    node.hear("hello")
    node.send({"kind": "start", "node": asdict(node.job.nodes[0])})
    before = node.hear("lines", lambda frame: frame["lines"] == ["before"])
    (tmp_path / "go").touch()
    after = node.hear("lines", lambda frame: frame["lines"] == ["after"])
    assert (before["rank"], after["rank"]) == (0, 7)
