"""Another user of the machine reaches the store of `train --procs` on the loopback: the run
continues, and still obeys a signal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.base.errors import ExitCode

LIMIT_S = 90.0
# of TCPStore's protocol
VALIDATE = b"\0"
SET = b"\1"
GET = b"\3"
MAGIC = struct.pack("=I", 0x3C85F7CE)
FLAGS = "--train.steps 1000000 --train.batch_size 32 --checkpoint.every_steps 20 --run run"
# It takes its time: others need the cores.
TASK = """
import time
from drumline.training.tasks import ImageClassification

class Slow(ImageClassification):
    defaults = {"data.name": "digits", "model.widths": [4]}

    def loss(self, model, batch):
        time.sleep(0.02)
        return super().loss(model, batch)
"""
REQUEST = b'{"signal": "SIGTERM", "host": "x", "rank": 0, "time": 0}'


def text(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


class StoreClient:
    """Speaks to the store without torch, as another user."""

    def __init__(self, port: int) -> None:
        # to look an address up would load modules, which this user cannot read
        self.line = socket.socket()
        self.line.settimeout(10)
        self.line.connect(("127.0.0.1", port))
        self.line.sendall(VALIDATE + MAGIC)

    def set(self, key: str, value: bytes) -> None:
        self.line.sendall(SET + text(f"/{key}".encode()) + text(value))

    def get(self, key: str) -> bytes:
        self.line.sendall(GET + text(f"/{key}".encode()))
        with self.line.makefile("rb") as answer:
            (length,) = struct.unpack("=Q", answer.read(8))
            return bytes(answer.read(length))


def attack(port: int, pids: list[int]) -> int:
    """What another user could do: bit 1, they read the name of the rendezvous; bit 2, they read a
    secret."""
    client = StoreClient(port)
    room = re.search(rb'"namespace": "([0-9a-f]+)"', client.get("drumline/rendezvous"))
    name = room[1].decode() if room else "unknown"
    for key in (
        "preemption/request",
        "preemption/decision",
        "failure/first",
        "failure/count",
        "pid/x/0",
    ):
        for value in (REQUEST, b"no JSON"):
            client.set(f"drumline/{name}/{key}", value)
    environments = []
    for pid in pids:
        with contextlib.suppress(OSError):
            environments.append(Path(f"/proc/{pid}/environ").read_bytes())
    return (1 if room else 0) | (
        2 if any(b"DRUMLINE_SECRET=" in environment for environment in environments) else 0
    )


def by_user(number: int, action: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setgroups([])
            os.setgid(number)
            os.setuid(number)
            code = action()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for(what: Callable[[], object], job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def store_port(pid: int) -> int:
    """Where that process listens."""
    inodes = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (port,) = (
        int(words[1].rpartition(":")[2], 16)
        for words in lines
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes
    )
    return port


@pytest.mark.soak
def test_another_user_neither_ends_a_run_nor_keeps_it_from_saving(
    other_user: int, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(TASK)
    job = subprocess.Popen(
        [sys.executable, "-m", "drumline", "train", "slow.py:Slow", *FLAGS.split(), "--procs", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    saved = tmp_path / "run" / "checkpoints"

    def steps() -> list[int]:
        return sorted(int(entry.name[5:]) for entry in saved.glob("step-????????"))

    try:
        wait_for(steps, job)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        port = store_port(job.pid)
        answer = by_user(other_user, lambda: attack(port, [job.pid, *map(int, children)]))
        assert answer == 1, "the store can be read; a secret cannot"
        step = steps()[-1]
        # As long as two looks of the watcher, and beyond.
        time.sleep(1.5)
        wait_for(lambda: steps()[-1] > step, job)
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
        job.communicate()
    assert job.returncode == ExitCode.PREEMPTED, said
    assert (tmp_path / "run" / "preempted.json").exists()
