"""Starts the processes that measure: torchrun on this machine, whose ranks share its cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType


def start_ranks(num_ranks: int, module: str, *arguments: str, limit_s: float | None = None) -> int:
    """Run a module on this many ranks; returns the exit code, which is not 0 after a timeout."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    command = [
        sys.executable,
        *torchrun,
        "--nproc-per-node",
        str(num_ranks),
        "-m",
        module,
        *arguments,
    ]
    signal.signal(signal.SIGTERM, _leave)
    with subprocess.Popen(command, env={"OMP_NUM_THREADS": threads, **os.environ}) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            print(f"{module} {arguments[0]}: not done after {limit_s:g} s", file=sys.stderr)
            return 1
        finally:
            process.terminate()  # torchrun then ends its ranks, after 30 s with SIGKILL


def _leave(number: int, frame: FrameType | None) -> None:
    """Leave the wait, so that no process is left."""
    sys.exit(128 + number)
