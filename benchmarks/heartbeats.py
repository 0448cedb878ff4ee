"""What the watchdog costs: one heartbeat, all heartbeats of a step, and steps with everything on or
off.

    make bench-watch        (or: python -m benchmarks.heartbeats --pairs 60)

Heartbeats are timed in blocks, in CPU time, on ranks with a group and a record in shared memory;
the number of heartbeats in a step is checked with the record of real steps. Then blocks of steps
alternate in the same processes: on, with heartbeats in the record and a running sidecar, with its
files in a run folder; off, without heartbeats and with the sidecar stopped. Each goes first in
every other pair, so that a slow machine slows both. It prints medians over blocks and over the
ratios of pairs, with the middle half.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.harness import time_steps
from benchmarks.in_memory import MINI_RESNET, WORK, InMemoryTask
from benchmarks.ranks import start_ranks
from benchmarks.report import quartiles
from benchmarks.stopping import resume, stop
from benchmarks.ways.ours import engine_steps
from drumline.config.schema import WatchConfig
from drumline.rank.collectives import collective_counter
from drumline.training.manager import RunManager
from drumline.watch.heartbeat import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    HeartbeatWriter,
    Phase,
    read_heartbeat,
)

NAME = MINI_RESNET
STEPS_PER_BLOCK = 4
GOAL_US = 5.0
GOAL_RATIO = 1.005
HEARTBEATS_PER_BLOCK = 5_000
MARKS_PER_STEP = 4


def marks(heartbeat: HeartbeatWriter, num_collectives: Callable[[], int]) -> None:
    for _ in range(HEARTBEATS_PER_BLOCK):
        heartbeat.mark(FORWARD)


def steps(heartbeat: HeartbeatWriter, num_collectives: Callable[[], int]) -> None:
    """The heartbeats of training/steps/eager.py and training/loop.py in steps of one
    micro-batch."""
    for step in range(HEARTBEATS_PER_BLOCK):
        heartbeat.next_micro()
        heartbeat.mark(FORWARD)
        heartbeat.mark(BACKWARD)
        heartbeat.mark(OPTIMIZER)
        heartbeat.count_collectives(num_collectives())
        heartbeat.begin_step(step)
        heartbeat.mark(DATA)


def time_heartbeats(ddp: RunManager, path: Path, rounds: int) -> None:
    heartbeat = HeartbeatWriter(path)
    num_collectives = collective_counter()
    times: dict[str, list[float]] = {"a mark": [], "a step's heartbeats": []}
    for _ in range(rounds):
        for name, write in zip(times, (marks, steps), strict=True):
            begun = time.thread_time()
            write(heartbeat, num_collectives)
            times[name].append((time.thread_time() - begun) / HEARTBEATS_PER_BLOCK * 1e6)
    if ddp.is_main_process():
        for name, taken in times.items():
            print(
                f"{name:<19} {described(taken, 3)} us, n = {rounds} blocks of {HEARTBEATS_PER_BLOCK}"
            )
        print_goal("a step's heartbeats", times["a step's heartbeats"], GOAL_US, "us")


def count_marks(ddp: RunManager, path: Path) -> None:
    """Those of real steps, by their record."""
    ddp.connection.heartbeat = HeartbeatWriter(path)
    taken = engine_steps(ddp, WORK[NAME], InMemoryTask(WORK[NAME]))
    time_steps(taken, STEPS_PER_BLOCK)  # the first one also has those of the start
    first = read_heartbeat(path)
    time_steps(taken, STEPS_PER_BLOCK)
    second = read_heartbeat(path)
    assert first is not None
    assert second is not None
    assert second.num_marks - first.num_marks == MARKS_PER_STEP * STEPS_PER_BLOCK, (
        "steps() is not what a step does"
    )


def run_rank(rounds: int, pairs: int, steps: int, device: str) -> None:
    # DDP warns about the strides of a 1x1 convolution's gradient, which is harmless.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    shared = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder,
        RunManager(seed=0, device=device, run=folder, watch=WatchConfig(sidecar="on")) as ddp,
    ):
        if pairs:
            compare_steps(ddp, pairs, steps)
        count_marks(ddp, Path(folder) / "steps.heartbeat")
        time_heartbeats(ddp, Path(folder) / "rank.heartbeat", rounds)


class NoHeartbeat:
    """The heartbeat's interface, without any effect."""

    def mark(self, phase: int) -> None: ...

    def begin_step(self, step: int) -> None: ...

    def next_micro(self) -> None: ...

    def count_collectives(self, number: int) -> None: ...


def compare_steps(ddp: RunManager, pairs: int, steps: int) -> None:
    watched = ddp.connection.heartbeat
    ways = {
        "on": engine_steps(ddp, WORK[NAME], InMemoryTask(WORK[NAME])),
        "off": engine_steps(ddp, WORK[NAME], InMemoryTask(WORK[NAME])),
    }
    for name, heartbeat in (("on", watched), ("off", NoHeartbeat())):
        ddp.connection.heartbeat = heartbeat  # type: ignore[assignment]
        # the first step takes the writer, and warms up
        time_steps(ways[name], STEPS_PER_BLOCK)
    assert ddp.connection.watch_folder is not None
    sidecar = int((ddp.connection.watch_folder / "sidecar.pid").read_text())
    times: dict[str, list[float]] = {"off": [], "on": []}
    for pair in range(pairs):
        for name in ("off", "on") if pair % 2 else ("on", "off"):
            resume(sidecar) if name == "on" else stop(sidecar)
            times[name].append(time_steps(ways[name], steps) * 1e3)
    watched.mark(Phase.LEFT)  # what follows is no run
    resume(sidecar)
    if ddp.is_main_process():
        ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
        print(
            f"{NAME}, {ddp.world_size} ranks ({ddp.device.type}), n = {pairs} pairs of blocks of {steps} steps"
        )
        for name, taken in times.items():
            print(f"  watch {name:<10} {described(taken, 2)} ms a step")
        print(f"  {'on / off':<16} {described(ratios, 4)}")
        print_goal("on / off", ratios, GOAL_RATIO, "")


def described(values: Sequence[float], digits: int) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def print_goal(what: str, values: Sequence[float], goal: float, unit: str) -> None:
    low, middle, high = quartiles(values)
    result = "met" if middle <= goal else "MISSED"
    doubt = (
        " (by the median; the middle half lies on both sides of it)" if low <= goal < high else ""
    )
    print(
        f"the goal for {what}, at most {goal:g}{unit and ' ' + unit}, is {result}{doubt}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="blocks of heartbeats [30]")
    parser.add_argument(
        "--pairs", type=int, default=100, help="pairs of blocks; 0: heartbeats alone [100]"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="of a block; for about a second of them [10]"
    )
    parser.add_argument("--ranks", type=int, default=2, help="of this machine [2]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="[cpu]")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.rounds, options.pairs, options.steps, options.device)
        return
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, {versions}"
    )
    names = ("rounds", "pairs", "steps", "device")
    start_ranks(
        options.ranks,
        "benchmarks.heartbeats",
        *(text for name in names for text in (f"--{name}", str(getattr(options, name)))),
    )


if __name__ == "__main__":
    main()
