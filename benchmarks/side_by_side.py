"""Two ways to take steps, side by side: same model, same data, same processes, turn by turn.

Blocks of steps alternate between the two, each going first in every other round. Printed are the medians over blocks
of the time per step, and their ratio, so that what slows the machine down slows both.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.config.schema import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from drumline.data.draws import Draws
from drumline.distributed.seeds import seed_shared
from drumline.engine.job import build_job
from drumline.engine.loop import Loop, make_step
from drumline.engine.saving import Progress
from drumline.manager import DDPManager
from drumline.metrics.events import Reporter
from drumline.tasks.base import Task
from drumline.tasks.load import load_task

STEPS_PER_BLOCK = 4
SAMPLES = 1024
WORK = {
    "MiniResNet 16-32-64, batch 32": Config(
        model=ModelConfig(widths=(16, 32, 64)),
        data=DataConfig(name="synthetic_images", samples=SAMPLES),
        train=TrainConfig(batch_size=32, epochs=10_000),
    ),
    "GPT 4 layers of 128, batch 8 x 128": Config(
        model=ModelConfig(name="gpt"),
        data=DataConfig(name="synthetic_tokens", samples=SAMPLES),
        optim=OptimConfig(name="adamw", lr=1e-3, clip_norm=1.0),
        train=TrainConfig(batch_size=8, epochs=10_000),
    ),
}
Steps = Callable[[DDPManager, Config], Iterator[None]]


class InMemory:
    """A dataset's samples, made once, so that the two loops differ in nothing but themselves."""

    def __init__(self, dataset: Any) -> None:
        self.inputs, self.targets = dataset.batch(np.arange(SAMPLES), None)

    def __len__(self) -> int:
        return SAMPLES

    def batch(self, indices: NDArray[np.int64], draws: Draws | None) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.targets[chosen]


def task_in_memory(config: Config) -> Task:
    task = load_task("synthetic")(config)
    samples = InMemory(task.train_data())
    model = task.model()
    task.model = lambda: model  # type: ignore[method-assign]
    task.train_data = lambda: samples  # type: ignore[method-assign]
    return task


def engine_steps(ddp: DDPManager, config: Config) -> Iterator[None]:
    """The training loop as `drumline train` runs it, one step at a time."""
    seed_shared(0)
    job = build_job(config, task_in_memory(config), ddp)
    loop = Loop(job, config, Progress(), Reporter([], rank=ddp.rank, host=ddp.host), Path(), {}, 10**6)
    train_step = make_step(job, config)
    while True:
        for step in job.loader.steps():
            loop.take_step(train_step, step)
            yield


def compare(
    description: str | None, *, first: tuple[str, Steps], second: tuple[str, Steps], ranks: str
) -> None:
    """The whole command: parse its flags, start the ranks for each line, measure, print."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default=ranks, help=f"numbers of ranks to measure on [{ranks}]")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of blocks [20]")
    parser.add_argument("--work", choices=WORK, help="one of the models only")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _measure_on_this_rank(options.work, options.rounds, (first[1], second[1]))
        return
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    print(f"{machine}, {options.rounds} pairs of blocks of {STEPS_PER_BLOCK} steps")
    names = f"{first[0] + ' (ms)':>16} {second[0] + ' (ms)':>14}"
    print(f"{'work':<36} {'ranks':>5} {names} {'ratio':>7}   middle half of pairs", flush=True)
    for num_ranks in options.ranks.split(","):
        for name in [options.work] if options.work else WORK:
            start_ranks(int(num_ranks), "--work", name, "--rounds", str(options.rounds))


def start_ranks(num_ranks: int, *arguments: str) -> None:
    """Run this script on so many ranks, which share the cores."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    subprocess.run(
        [sys.executable, *torchrun, sys.argv[0], *arguments],
        env={**os.environ, "OMP_NUM_THREADS": threads},
        check=True,
    )


def time_block(loop: Iterator[None]) -> float:
    """Seconds a step, over a few of them."""
    started = time.perf_counter()
    for _ in range(STEPS_PER_BLOCK):
        next(loop)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS_PER_BLOCK


def _measure_on_this_rank(name: str, rounds: int, ways: tuple[Steps, Steps]) -> None:
    # DDP finds the strides of a 1x1 convolution's gradient odd; there is nothing to it.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    with DDPManager(seed=0) as ddp:
        first, second = _measure([way(ddp, WORK[name]) for way in ways], rounds)
        if ddp.is_main_process():
            ratio = statistics.median(second) / statistics.median(first)
            pairs = sorted(b / a for a, b in zip(first, second, strict=True))
            print(
                f"{name:<36} {ddp.world_size:>5} {statistics.median(first) * 1e3:>16.2f} "
                f"{statistics.median(second) * 1e3:>14.2f} {ratio:>7.3f}   "
                f"{pairs[len(pairs) // 4]:.3f} to {pairs[len(pairs) * 3 // 4]:.3f}",
                flush=True,
            )


def _measure(loops: list[Iterator[None]], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a step, in blocks that alternate."""
    for loop in loops * 2:
        time_block(loop)  # warm-up
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (turn % 2, 1 - turn % 2):
            times[which].append(time_block(loops[which]))
    return times
