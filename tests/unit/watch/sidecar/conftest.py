"""Real processes to observe: plain Python without torch, each with a heartbeat and the answering
side of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# The thread stands in for the one that a run's ranks have.
RANK = """
import ctypes, os, signal, sys, threading, time
from contextlib import suppress
from pathlib import Path
from drumline.rank.watched.watched_rank import torch_report
from drumline.watch.heartbeat import HeartbeatWriter, Phase
from drumline.watch.self_report import name_answering_thread, register_stack_signals, write_report

folder = Path(sys.argv[1])

def serve():
    name_answering_thread()
    is_there.set()
    while True:
        write_report(folder, 3, os.read(fifo, 4096)[-1], torch_report)

register_stack_signals(folder / "rank-00003.stacks")
os.mkfifo(folder / "rank-00003.ask")
fifo = os.open(folder / "rank-00003.ask", os.O_RDWR)
is_there = threading.Event()
threading.Thread(target=serve, daemon=True).start()
is_there.wait()
heartbeat = HeartbeatWriter(folder / "rank-00003.heartbeat", rank=3)
heartbeat.begin_step(812)
heartbeat.mark(Phase.DATA)

def say(word):
    print(word, flush=True)

def wait_forever(*_):
    os.read(os.pipe()[0], 1)

"""


class StartRank:
    """Starts ranks that run some lines of Python, and ends them with all that they forked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, body: str) -> subprocess.Popen[str]:
        """Back when it has said `ready`."""
        script = self.folder / "job.py"
        script.write_text(RANK + body)
        process = subprocess.Popen(
            [sys.executable, str(script), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            process_group=0,
        )
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process


@pytest.fixture
def start_rank(tmp_path: Path) -> Iterator[StartRank]:
    start = StartRank(tmp_path)
    yield start
    for process in start.started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
