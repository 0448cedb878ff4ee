"""What the sample ledger costs: `ledger.add` against a whole training step, in one run.

    make bench-exact        (or: python -m benchmarks.ledger)

The steps are the engine's (MiniResNet, batch 32, one rank). Blocks of steps alternate with blocks
of `ledger.add`. Printed are the medians over blocks and their ratio; the goal is below 0.5 %.
Besides: what handing in and writing down costs each save, on the disk of the folder for temporary
files.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import time_steps
from benchmarks.in_memory import MINI_RESNET, WORK, InMemoryTask
from benchmarks.ways.ours import engine_steps
from drumline.data.sharding import Cursor, Ledger, Sharding, plan_epoch
from drumline.training.between_steps.saver import LedgerFile
from drumline.training.job.job import Progress
from drumline.training.manager import RunManager

NAME = MINI_RESNET
STEPS_PER_BLOCK = 4
GOAL = 0.005
ADDS_PER_BLOCK = 10_000


def time_adds(ledger: Ledger) -> float:
    """Seconds for one `add`, epochs and their short last batches included."""
    sharding = Sharding(batch_size=32, rank=0, world_size=1)
    plans = [
        plan
        for epoch in range(ADDS_PER_BLOCK // 500)
        for plan in plan_epoch(Cursor(epoch), length=32 * 500 - 3, sharding=sharding)
    ]
    started = time.perf_counter()
    for plan in plans:
        ledger.add(plan)
    seconds = (time.perf_counter() - started) / len(plans)
    ledger.take()
    return seconds


def time_save(ddp: RunManager, rounds: int) -> float:
    """Seconds to write down one stretch of steps, and to wait until it is on the device."""
    plan = next(
        plan_epoch(Cursor(), length=64, sharding=Sharding(batch_size=32, rank=0, world_size=1))
    )
    times = []
    with tempfile.TemporaryDirectory() as folder:
        file = LedgerFile(Path(folder) / "ledger.jsonl")
        for step in range(1, rounds + 2):  # the first one makes the file
            file.ledger.add(plan)
            started = time.perf_counter()
            file.gather(Progress(step))
            file.flush()
            times.append(time.perf_counter() - started)
        file.close()
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="pairs of blocks [10]")
    rounds = parser.parse_args().rounds
    with RunManager(device="cpu", seed=0) as ddp:
        steps = engine_steps(ddp, WORK[NAME], InMemoryTask(WORK[NAME]))
        time_steps(steps, STEPS_PER_BLOCK)  # warm-up
        ledger = Ledger()
        times = [(time_steps(steps, STEPS_PER_BLOCK), time_adds(ledger)) for _ in range(rounds)]
        save = time_save(ddp, rounds)
        is_main = ddp.is_main_process()
    if not is_main:
        return
    step, add = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {rounds} rounds"
    )
    print(
        f"{NAME}: step {step * 1e3:.2f} ms, ledger.add {add * 1e6:.2f} us, {add / step:.5%} of a step"
    )
    print(f"each save: {save * 1e3:.2f} ms")
    print(f"the goal, below {GOAL:.1%}, is {'met' if add / step < GOAL else 'MISSED'}")


if __name__ == "__main__":
    main()
