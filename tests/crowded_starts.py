"""Healthy starts of `drumline train digits --procs 2` on a crowded machine: none reports a stall
before its first step.

    python3 -m tests.crowded_starts --count 12 --busy 6        (make soak-starts)

The processes of a start wait for the CPU most of the time, and each start is slower than on a free
machine. The output of a start with a `stall:` line, or one that failed, is shown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.hsdp_starts import busy_processes

FIRST_STEP = "first step "
"""In the line that a run logs after its first step."""
STALL = "stall:"
START_LIMIT_S = 900.0


def run_start(run: Path) -> subprocess.CompletedProcess[str]:
    """A job of three steps, to its end."""
    command = [
        sys.executable,
        "-m",
        "drumline",
        "train",
        "digits",
        "--procs",
        "2",
        "--run",
        str(run),
    ]
    settings = ["--dist.device", "cpu", "--train.steps", "3", "--log.every_steps", "1"]
    return subprocess.run(
        [*command, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )


def stalls_before_first_step(output: str) -> list[str]:
    before, _, _ = output.partition(FIRST_STEP)
    return [line for line in before.splitlines() if STALL in line]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=12, help="how many starts, one after the other [12]"
    )
    parser.add_argument(
        "--busy", type=int, default=6, help="how many processes compute meanwhile [6]"
    )
    options = parser.parse_args()
    num_stalls = 0
    num_failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="crowded-starts-") as folder,
        busy_processes(options.busy),
    ):
        for number in range(1, options.count + 1):
            began_at = time.monotonic()
            start = run_start(Path(folder) / f"start-{number}")
            stalls = stalls_before_first_step(start.stdout)
            has_failed = start.returncode != 0 or FIRST_STEP not in start.stdout
            num_stalls += len(stalls)
            num_failed += has_failed
            print(
                f"start {number}: {len(stalls)} stall lines before the first step, exit code {start.returncode}, "
                f"{time.monotonic() - began_at:.0f} s, load {os.getloadavg()[0]:.0f}",
                flush=True,
            )
            if stalls or has_failed:
                print(start.stdout, flush=True)
    print(
        f"{options.count} starts beside {options.busy} busy processes: {num_stalls} stall lines before the first step, "
        f"{num_failed} failed"
    )
    return int(bool(num_stalls or num_failed))


if __name__ == "__main__":
    sys.exit(main())
