"""A process is asked for its stack only if it can answer: to all others the signal would be the
end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

from drumline.base import processes
from drumline.base.processes import state_of
from drumline.watch.self_report import WORKER_SIGNAL
from drumline.watch.sidecar.rank_process import ask_stack, fatal_stack, main_thread_stack, shorten
from tests.unit.watch.sidecar.conftest import StartRank, wait_until

DUMP = """\
Current thread 0x0000ffffb6e261a0 (most recent call first):
  File "/job/train.py", line 4 in attend
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x0000ffffb7a22020 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751 in _wrapped_call_impl
  File "/job/data/images.py", line ??? in <listcomp>
  File "/job/train.py", line 8 in <module>
"""


def test_a_process_without_the_handler_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert asyncio.run(ask_stack(process.pid, tmp_path / "stacks")) == ()
            time.sleep(0.05)
            assert process.poll() is None
        finally:
            process.kill()
    assert asyncio.run(ask_stack(process.pid, tmp_path / "stacks")) == (), "it is gone"


def test_without_a_thread_for_answers_the_main_thread_is_asked_and_not_in_the_kernel(
    start_rank: StartRank, tmp_path: Path
) -> None:
    """A forked worker has none. Nothing is left waiting for it: its next answer is to the next
    question."""
    rank = start_rank(
        "number = {'x86_64': 56, 'aarch64': 220}[os.uname().machine]\n"
        "def worker():\n"
        "    sys.stdin.read(1)\n"
        "    if ctypes.CDLL(None).syscall(number, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:\n"
        "        wait_forever()\n"
        "    wait_forever()\n"
        "if os.fork() == 0:\n"
        "    worker()\n"
        "say('ready')\n"
        "wait_forever()\n"
    )
    (worker,) = processes.children(rank.pid)
    file = tmp_path / "rank-00003.stacks"
    wait_until(
        lambda: "read" in Path(f"/proc/{worker}/wchan").read_text() or state_of(worker) == "S"
    )
    assert asyncio.run(ask_stack(worker, file, signal=WORKER_SIGNAL))[0].endswith(" in worker")
    size = file.stat().st_size
    assert asyncio.run(ask_stack(worker, file, signal=WORKER_SIGNAL))
    assert file.stat().st_size == size, "emptied before each question"
    assert rank.stdin is not None
    rank.stdin.write("x")
    rank.stdin.flush()
    wait_until(lambda: state_of(worker) == "D")
    assert asyncio.run(ask_stack(worker, file, signal=WORKER_SIGNAL)) == ()
    status = processes.read_status(worker)
    assert (int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)) & 1 << (WORKER_SIGNAL - 1) == 0
    (child,) = processes.children(worker)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: state_of(worker) == "S")
    assert asyncio.run(ask_stack(worker, file, signal=WORKER_SIGNAL))[0].endswith(
        " in wait_forever"
    )


def test_the_main_thread_is_the_last_one() -> None:
    assert main_thread_stack(DUMP, "/job") == (
        "torch/nn/modules/module.py:1751 in _wrapped_call_impl",
        "data/images.py:??? in <listcomp>",
        "train.py:8 in <module>",
    )
    assert main_thread_stack(DUMP + DUMP, "/job") == (), "two answers in one"
    assert main_thread_stack("", "/job") == ()


def test_the_last_stack_is_the_one_that_a_fatal_signal_left(tmp_path: Path) -> None:
    file = tmp_path / "stacks"
    assert fatal_stack(file) == ()
    file.write_text(DUMP)
    assert fatal_stack(file) == (), "an answer"
    file.write_text(f"{DUMP}Fatal Python error: Aborted\n\n{DUMP.replace('line 8', 'line 9')}")
    assert fatal_stack(file)[-1] == "job/train.py:9 in <module>"


def test_paths_are_as_long_as_it_takes_to_find_the_file() -> None:
    assert shorten("/usr/lib/python3.11/threading.py", "/job") == "python3.11/threading.py"
    assert shorten("/job/train.py", "/job/") == "train.py"
    assert shorten("/jobs/deep/train.py", "/job") == "deep/train.py"
    assert shorten("<string>", "") == "<string>"
