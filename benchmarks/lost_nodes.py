"""A node is killed in the middle of a round: steps lost and seconds paused, where the others
continue, and where all ranks restart.

    make bench-lost         (or: python -m benchmarks.lost_nodes --nodes 3 --every 50)

Each node is a `drumline launch` of its own on this machine, with one rank. The rank of the last
node is killed with SIGKILL after step 3.5 x H; its launcher restarts it. A node's step that is in
no weights, or is repeated, is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from drumline.runs.events import read_events
from tests.ranks import free_port

LIMIT_S = 300.0


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return [
            event
            for event in read_events(run / "events" / "rank-00000.jsonl")
            if event["kind"] == kind
        ]
    return []


def wait_for(is_so: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"never: {what}")
        time.sleep(0.05)


def measure(
    folder: Path, num_nodes: int, every: int, on_lost: str, flags: Sequence[str]
) -> dict[str, Any]:
    """One run, with one kill."""
    run = folder / "run"
    port = free_port()
    kill_at = every * 7 // 2
    words = [
        "digits", "--run", str(run), "--model.widths", "8",
        "--dist.sync", f"diloco:{every}", "--dist.on_lost_node", on_lost,
        "--train.steps", str(every * 400), "--log.every_steps", "5", "--checkpoint.every_steps", str(every),
        "--checkpoint.every_epochs", "0",
        "--train.eval_every_epochs", "0", "--dist.device", "cpu", *flags,
    ]  # fmt: skip
    launchers = []
    for number in range(num_nodes):
        where = [
            "--nodes",
            str(num_nodes),
            "--node-rank",
            str(number),
            "--master",
            f"127.0.0.1:{port}",
            "--procs",
            "1",
        ]
        with (folder / f"output-{number}").open("w") as output:
            command = [sys.executable, "-m", "drumline", "launch", *where, *words]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            launchers.append(
                subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            )
    try:
        wait_for(
            lambda: [event for event in events(run, "train") if event["step"] >= kill_at],
            f"step {kill_at}",
        )
        (rank,) = children(launchers[-1].pid, f"RANK={num_nodes - 1}")
        killed_at = time.time()
        os.kill(rank, signal.SIGKILL)
        kind = "regrouped" if on_lost == "continue" else "recovered"
        wait_for(
            lambda: len(events(run, kind)) >= (2 if on_lost == "continue" else 1),
            "all nodes train again",
        )
        changes = events(run, kind)
        steps = [(event["time"], event["step"]) for event in events(run, "train")]
    finally:
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            launcher.wait()
    last = max(step for logged_at, step in steps if logged_at <= killed_at)
    if on_lost == "continue":
        noticed = changes[0]["step"]  # by a log line, or by the next round
        lost = (noticed - 1) % every + 1
        paused = [change["seconds"] for change in changes]
    else:
        back = changes[0]["step"] - 1
        lost = (last - back) * num_nodes
        paused = [changes[0]["seconds"]]
    return {"killed after step": last, "steps lost": lost, "paused": paused}


def children(pid: int, word: str) -> list[int]:
    """The processes below it that have this in their environment."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and word.encode() in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--every", type=int, default=50, help="steps between two rounds [50]")
    parser.add_argument("--flags", default="", help="more flags")
    options = parser.parse_args()
    machine = (
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}"
    )
    print(f"{machine}, torch {torch.__version__}, Python {platform.python_version()}")
    print(
        f"digits, {options.nodes} nodes with one rank each on this machine, diloco:{options.every}, saved every round"
    )
    print("dist.on_lost_node   killed after   node steps lost   the others paused, s", flush=True)
    for on_lost in ("continue", "restart"):
        with tempfile.TemporaryDirectory() as scratch:
            result = measure(
                Path(scratch), options.nodes, options.every, on_lost, options.flags.split()
            )
        paused = " + ".join(f"{seconds:.1f}" for seconds in result["paused"])
        print(
            f"{on_lost:<19} {result['killed after step']:>12} {result['steps lost']:>17}   {paused}",
            flush=True,
        )


if __name__ == "__main__":
    main()
