"""No rank outlives the launcher that started it, nor its watch folder, however that one ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.launch.node.guard import job_processes

ROOT = Path(__file__).parents[2]
# A rank in a session of its own, as torchrun starts it, with a child in another; the second one
# does not heed SIGTERM.
SCRIPT = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (open("told", "w").close(), os._exit(75)))
subprocess.Popen(["setsid", "sleep", "1000"])
# In one piece: torchrun's ranks do not buffer, and the words of two would mix.
os.write(1, f"{os.environ['DRUMLINE_JOB']} {os.environ['DRUMLINE_WATCH_DIR']}\\n".encode())
time.sleep(1000)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_ranks_end_with_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "drumline", "launch", "--grace", "1", "--procs", "2", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout
    try:
        lines = [launcher.stdout.readline() for _ in range(2)]
        assert len(set(lines)) == 1, lines
        job, place = lines[0].split()
        folder = Path(place)
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
        wait_until(lambda: len(job_processes(job)) == 4)
        launcher.send_signal(number)
        launcher.wait(60)
        wait_until(lambda: not job_processes(job))
        compile_cache = f"drumline-compile-{os.getuid()}"  # for the next job
        left = {path.name for path in temporary.iterdir()} - {compile_cache}
        assert left == set(), "neither torch's agent nor ours leaves anything"
        # The guard of a launcher that was killed does it a moment later.
        wait_until(lambda: not list(folder.parent.parent.glob(f"drumline-watch-{job[:8]}-*")))
    finally:
        launcher.stdout.close()
        launcher.kill()
        launcher.wait()
    assert (tmp_path / "told").exists(), "ranks are asked before they are made to"
