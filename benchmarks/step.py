"""The engine's step against a hand-written loop: same model, same data, same process, turn by turn.

    make bench        (or: python benchmarks/step.py --ranks 1,2 --rounds 15)

For each model and number of ranks, blocks of steps alternate between the two. Printed are the medians over blocks of
the time per step, and their ratio: what sampling, loading, the schedule and metering cost.
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
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from drumline.config.schema import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from drumline.data.draws import Draws
from drumline.distributed.seeds import seed_shared
from drumline.engine.job import build_job
from drumline.engine.loop import Loop
from drumline.engine.saving import Progress
from drumline.engine.step import TrainStep
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
    train_step = TrainStep(job, clip_norm=config.optim.clip_norm)
    while True:
        for step in job.loader.steps():
            loop.take_step(train_step, step)
            yield


def hand_written_steps(ddp: DDPManager, config: Config) -> Iterator[None]:
    """What a careful person writes with plain torch: samples in memory, a shuffled index, DDP, a fused optimizer."""
    seed_shared(0)
    task = task_in_memory(config)
    data: InMemory = task.train_data()
    batch_size = (config.train.batch_size or 0) // ddp.world_size
    model: nn.Module = task.model()
    if ddp.backend is not None:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = plain_optimizer(model, config)
    while True:
        order = torch.randperm(SAMPLES)[ddp.rank :: ddp.world_size]
        for chosen in order.split(batch_size):
            optimizer.zero_grad(set_to_none=True)
            scores = model(data.inputs[chosen])
            functional.cross_entropy(scores.flatten(0, -2), data.targets[chosen].flatten()).backward()
            if config.optim.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
            optimizer.step()
            yield


def plain_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    optim = config.optim
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)
    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)


def time_block(take_step: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in range(STEPS_PER_BLOCK):
        take_step()
    return (time.perf_counter() - started) / STEPS_PER_BLOCK


def measure(ddp: DDPManager, config: Config, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a step by hand and by the engine, in blocks that alternate; each goes first in every other round."""
    loops = [hand_written_steps(ddp, config), engine_steps(ddp, config)]
    for loop in loops * 2:
        time_block(loop.__next__)  # warm-up
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (turn % 2, 1 - turn % 2):
            times[which].append(time_block(loops[which].__next__))
    return times


def run_rank(name: str, rounds: int) -> None:
    # DDP finds the strides of a 1x1 convolution's gradient odd; there is nothing to it.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    with DDPManager(seed=0) as ddp:
        plain, ours = measure(ddp, WORK[name], rounds)
        if ddp.is_main_process():
            ratio = statistics.median(ours) / statistics.median(plain)
            pairs = sorted(b / a for a, b in zip(plain, ours, strict=True))
            print(
                f"{name:<36} {ddp.world_size:>5} {statistics.median(plain) * 1e3:>13.2f} "
                f"{statistics.median(ours) * 1e3:>10.2f} {ratio:>7.3f}   "
                f"{pairs[len(pairs) // 4]:.3f} to {pairs[len(pairs) * 3 // 4]:.3f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks to measure on [1,2]")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of blocks [20]")
    parser.add_argument("--work", choices=WORK, help="one of the models only")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.work, options.rounds)
        return
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    print(f"{machine}, {options.rounds} pairs of blocks of {STEPS_PER_BLOCK} steps")
    header = f"{'work':<36} {'ranks':>5} {'by hand (ms)':>13} {'ours (ms)':>10} {'ratio':>7}   middle half of pairs"
    print(header, flush=True)
    for num_ranks in options.ranks.split(","):
        for name in [options.work] if options.work else WORK:
            start_ranks(int(num_ranks), name, options.rounds)


def start_ranks(num_ranks: int, name: str, rounds: int) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    subprocess.run(
        [*torchrun, __file__, "--work", name, "--rounds", str(rounds)],
        env={**os.environ, "OMP_NUM_THREADS": threads},
        check=True,
    )


if __name__ == "__main__":
    main()
