"""`drumline launch --hosts` on real hosts: one command starts, shows and ends the whole job, whatever happens to it."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode import processes
from tests.multinode.hosts import Host, Testbed
from tests.multinode.job import Job
from tests.multinode.sshd import SshDaemons

MakeTestbed = Callable[..., Testbed]
MakeDesk = Callable[..., "Desk"]
ROOT = Path(__file__).parents[2]
# Ranks that do not load torch: that they are started, shown and ended is what is looked at.
TALK = """
import os, socket, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} is on {socket.gethostname()} with {sys.argv[1:]}")
print(f"{os.environ['NOTE']} {len(os.environ['TOKEN'])} {os.environ.get('STAYS')}", file=sys.stderr)
if rank == 1:
    sys.stdout.buffer.write(b"\\xff\\x00\\x07 bytes\\n" + b"long" * 50_000 + b"\\n")
    sys.stdout.buffer.write(b"fast\\n" * 2_000_000 + b"no end")
    sys.stdout.flush()
    Path("said").touch()
    raise ValueError("this is the first")
while not Path("said").exists() or rank != 2:
    time.sleep(0.05)
time.sleep(0.3)
sys.exit(9)
"""
# Says when it is up and when it is asked to end, which rank 1 does not heed; has a child in a session of its own.
SLEEP = """
import os, signal, subprocess, time
rank = os.environ["RANK"]
def leave(*_):
    print(f"rank {rank} saves", flush=True)
    if rank != "1":
        os._exit(75)
signal.signal(signal.SIGTERM, leave)
subprocess.Popen(["setsid", "sleep", "1000"])
print(f"rank {rank} is up as {os.environ['DRUMLINE_JOB']}", flush=True)
while True:
    time.sleep(1)
"""


class Desk:
    """Where the user sits: the first host, from which ssh leads to all."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        self.ssh = SshDaemons(bed)

    def launch(self, *words: str, env: dict[str, str] | None = None) -> Job:
        ssh = f"ssh -F {self.ssh.config}"
        return self.bed.hosts[0].start(
            *(sys.executable, "-m", "drumline", "launch", "--ssh", ssh, *words),
            env={"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0", **(env or {})},
            cwd=self.folder,
        )

    def sleepers(self, *words: str) -> tuple[Job, str]:
        """A job that would run for ever, up on all its ranks; and its marker."""
        (self.folder / "sleep.py").write_text(SLEEP)
        hosts = ",".join(host.name for host in self.bed)
        job = self.launch("--hosts", hosts, "--procs", "1", *words, "sleep.py")
        for rank in range(len(self.bed.hosts)):
            job.wait_for(f"rank {rank} is up as ")
        (name,) = set(re.findall(r" is up as (\w+)", job.text()))
        for host in self.bed:
            assert len(host.find(f"DRUMLINE_JOB={name}")) >= 3, "the agent, the rank and its child"
        return job, f"DRUMLINE_JOB={name}"

    def wait_for_none(self, marker: str, *hosts: Host) -> None:
        for host in hosts or self.bed.hosts:
            processes.wait_until(
                lambda host=host: not host.find(marker), f"no {marker} on {host}", timeout_s=20
            )


@pytest.fixture(name="make_desk")
def _make_desk(make_testbed: MakeTestbed, tmp_path: Path) -> Callable[..., Desk]:
    def make(*names: str) -> Desk:
        folder = tmp_path / "a folder"
        folder.mkdir()
        return Desk(make_testbed(*names), folder)

    return make


def test_all_ranks_are_on_one_screen_and_the_first_failure_is_told_last(make_desk: MakeDesk) -> None:
    desk = make_desk("a", "b", "c")
    (desk.folder / "talk.py").write_text(TALK)
    (desk.folder / "hosts").write_text("a\nb\nroot@c slots=2\n")
    job = desk.launch(
        *("--hostfile", "hosts", "--procs", "1", "--env", "TOKEN", "--env", "NOTE=a note", "--grace", "2"),
        *("talk.py", "x y"),
        env={"TOKEN": "hunter2", "STAYS": "here"},
    )
    job.wait_for("is on c")
    assert not any("hunter2" in processes.command(pid) for host in desk.bed for pid in host.space.pids())
    code, text = job.wait(), job.text()
    assert code == 1, text[-3000:]
    for rank, host in enumerate("abcc"):
        assert f"[{host} {rank}] rank {rank} of 4 is on {host} with ['x y']\n" in text
        assert f"[{host} {rank}] a note 7 None\n" in text
    assert f"[b 1] {chr(0xFFFD) * 3} bytes\n" in text
    assert f"[b 1] {'long' * 1000} ...\n" in text
    assert "[b 1] fast\n" in text
    assert "[b 1] no end\n" in text
    (logs,) = (desk.folder / "runs" / "launch").iterdir()
    assert f"drumline: 3 hosts; logs in runs/launch/{logs.name} on each\n" in text
    whole = (logs / "rank-00001.out").read_bytes()
    assert whole.count(b"fast\n") == 2_000_000
    assert whole.endswith(b"no end")
    assert "bytes are not shown; all is in" in text
    last = text[text.rindex("drumline: rank") :].splitlines()
    assert last[0] == "drumline: rank 1 on b (exit code 1) failed first:"
    assert last[1] == "  Traceback (most recent call last):"
    assert last[-3] == "  ValueError: this is the first"
    assert last[-2] == "drumline: the others: rank 2 on c (exit code 9) failed after it; 2 ranks were stopped"
    assert last[-1] == f"drumline: logs in runs/launch/{logs.name} on each host"
    assert "hunter2" not in text + "".join(path.read_text(errors="replace") for path in logs.iterdir())


def test_no_rank_outlives_the_controller_or_a_supervisor(make_desk: MakeDesk) -> None:
    desk = make_desk("a", "b")
    job, marker = desk.sleepers("--grace", "2")
    job.send(signal.SIGTERM)
    assert job.wait() == 130
    assert "[a 0] rank 0 saves" in job.text()
    assert "drumline: interrupted; all ranks were stopped\n" in job.text()
    assert not any(host.find(marker) for host in desk.bed), "also the one that does not heed SIGTERM"

    job, marker = desk.sleepers("--grace", "2")
    job.send(signal.SIGKILL)
    desk.wait_for_none(marker)
    (logs, *_) = sorted((desk.folder / "runs" / "launch").iterdir(), reverse=True)
    assert "rank 0 saves" in (logs / "rank-00000.out").read_text()

    job, marker = desk.sleepers("--grace", "2")
    b = desk.bed["b"]
    (supervisor,) = [pid for pid in b.space.pids() if "launch.supervisor" in processes.command(pid)]
    processes.send([supervisor], signal.SIGKILL)
    assert job.wait() == 1
    assert "drumline: error: b was lost: " in job.text()
    desk.wait_for_none(marker)


def test_a_lost_host_ends_the_job_on_all(make_desk: MakeDesk) -> None:
    desk = make_desk("a", "b", "c")
    job, marker = desk.sleepers("--grace", "2")
    b, c = desk.bed["b"], desk.bed["c"]
    b.cut()
    c.power_off()
    cut_at = time.monotonic()
    desk.wait_for_none(marker, desk.bed["a"], b)
    assert job.wait() == 1
    print(job.text(), time.monotonic() - cut_at)
    assert "drumline: error: b was lost: " in job.text()
    assert "drumline: error: c was lost: " in job.text()
