"""`drumline launch --hosts` continues by itself when a host's part is lost: its agent, its link,
the host itself."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode import processes
from tests.multinode.hosts import Host, Testbed
from tests.multinode.sshd import SshDaemons
from tests.multinode.warm_host import FOLDER
from tests.warm import CLIENT

ROOT = Path(__file__).parents[2]
AGENT = "-m drumline.launch.ssh.agent_process"
# as `ps` shows a warm one
PYTHON = f"{sys.executable} -I -S {CLIENT} {FOLDER / 'server'}"
CUT_S = 6.0
# Ranks that load no torch, and note their starts. Rank 1 exits with 0 when it is asked to, and rank
# 0 fails for it, as one whose peer is gone does.
RANKS = """
import os, socket, sys, time
from pathlib import Path
rank = os.environ["RANK"]
with Path(f"starts-{rank}").open("a") as starts:
    starts.write("x")
start = Path(f"starts-{rank}").stat().st_size
print(f"rank {rank} on {socket.gethostname()}: start {start}, restarted {os.environ.get('DRUMLINE_RESTARTED')}")
while not Path("finish").exists():
    time.sleep(0.05)
    if rank == "1" and Path("leave").exists():
        Path("leave").rename("left")
        os._exit(0)
    if rank == "0" and Path("left").exists():
        Path("left").unlink()
        sys.exit(9)
"""


def find(host: Host, words: str) -> set[int]:
    """By the command line; not sshd's shell, nor `env`."""
    return {
        pid for pid in host.space.pids() if processes.command(pid).startswith(f"{PYTHON} {words}")
    }


def kill_agent(host: Host) -> None:
    running = find(host, AGENT)
    assert len(running) == 1
    processes.send(running, signal.SIGKILL)


@pytest.mark.soak
def test_what_is_lost_is_started_again_by_itself(
    make_testbed: Callable[..., Testbed], tmp_path: Path
) -> None:
    bed = make_testbed("a", "b", "c", warm=True)
    ssh = SshDaemons(bed)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "ranks.py").write_text(RANKS)
    job = bed["a"].start(
        *(
            bed["a"].python,
            "-m",
            "drumline",
            "launch",
            "--hosts",
            "a,b",
            "--spare",
            "c",
            "--procs",
            "1",
        ),
        *("--max-restarts", "20", "--grace", "3", "--env", "PYTHONUNBUFFERED=1", "ranks.py"),
        env={"PYTHONPATH": str(ROOT), "DRUMLINE_SSH": f"ssh -F {ssh.config}"},
        cwd=folder,
    )

    def wait_for_start(number: int, hosts: str = "ab", timeout_s: float = 90) -> None:
        for rank, host in enumerate(hosts):
            job.wait_for(f"rank {rank} on {host}: start {number}, ", timeout_s=timeout_s)

    wait_for_start(1)
    kill_agent(bed["b"])
    wait_for_start(2)
    assert (
        "drumline: warning: the launcher's agent on b was killed by SIGKILL; restarting all ranks "
        "(restart 1 of 20), the script starts from the beginning\n"
    ) in job.text()
    assert "rank 0 on a: start 2, restarted 1\n" in job.text()

    kill_agent(bed["a"])  # where the nodes meet
    wait_for_start(3)
    assert "agent on a was killed by SIGKILL; restarting all ranks (restart 2 of 20)" in job.text()

    (folder / "leave").touch()
    wait_for_start(4)
    assert (
        "[b] drumline: restarting the ranks (node 0 (a) restarted); the script starts from the beginning\n"
        in job.text()
    )
    assert "restarting all ranks (restart 3 of 20)" not in job.text(), (
        "no part was lost: the agents did it among themselves"
    )

    ranks = bed["b"].find("RANK=1")
    bed["b"].cut()
    time.sleep(CUT_S)
    assert bed["b"].find("RANK=1") == ranks != [], "a host that is cut off for so long is not lost"
    bed["b"].restore()
    assert job.is_running()

    a = bed["a"]
    bed["b"].power_off()
    job.wait_for("drumline: c replaces b, which is unreachable (", timeout_s=90)
    job.wait_for("rank 1 on c: start ", timeout_s=90)
    processes.wait_until(lambda: bool(find(a, "ranks.py")), "rank 0 on a")
    (folder / "finish").touch()
    assert job.wait(60) == 0, job.text()
    assert not find(a, "-m drumline")
    (logs,) = (folder / "runs" / "launch").iterdir()
    assert (logs / "rank-00000.restart-2.out").read_text().startswith("rank 0 on a: start 3, "), (
        "each start has files of its own"
    )
