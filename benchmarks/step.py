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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from drumline.config.schema import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from drumline.distributed.seeds import seed_shared
from drumline.engine.job import build_job
from drumline.engine.loop import Loop
from drumline.engine.saving import Progress
from drumline.engine.step import TrainStep
from drumline.manager import DDPManager
from drumline.metrics.events import Reporter
from drumline.tasks.load import load_task

STEPS_PER_BLOCK = 4
WORK: dict[str, tuple[str, Config]] = {
    "MiniResNet 16-32-64, batch 64": (
        "synthetic",
        Config(
            model=ModelConfig(widths=(16, 32, 64)),
            data=DataConfig(name="synthetic_images", samples=4096),
            train=TrainConfig(batch_size=64, epochs=10_000),
        ),
    ),
    "GPT 4 layers, width 128, batch 16 x 128": (
        "synthetic",
        Config(
            model=ModelConfig(name="gpt"),
            data=DataConfig(name="synthetic_tokens", samples=4096),
            optim=OptimConfig(name="adamw", lr=1e-3, clip_norm=1.0),
            train=TrainConfig(batch_size=16, epochs=10_000),
        ),
    ),
}


def engine_steps(ddp: DDPManager, task: str, config: Config) -> Iterator[None]:
    """The training loop as `drumline train` runs it, one step at a time."""
    seed_shared(0)
    job = build_job(config, load_task(task)(config), ddp)
    loop = Loop(job, config, Progress(), Reporter([], rank=ddp.rank, host=ddp.host), Path(), {})
    train_step = TrainStep(job, clip_norm=config.optim.clip_norm)
    while True:
        for step in job.loader.steps():
            loop.take_step(train_step, step)
            yield


def hand_written_steps(ddp: DDPManager, task: str, config: Config) -> Iterator[None]:
    """What a careful person writes with plain torch; its batches are ready-made tensors, made by the same dataset."""
    built = load_task(task)(config)
    batch_size = (config.train.batch_size or 0) // ddp.world_size
    batches = ready_batches(built.train_data(), batch_size)
    model: nn.Module = built.model()
    if ddp.world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = plain_optimizer(model, config)
    while True:
        for inputs, targets in batches:
            optimizer.zero_grad(set_to_none=True)
            scores = model(inputs)
            functional.cross_entropy(scores.flatten(0, -2), targets.flatten()).backward()
            if config.optim.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
            optimizer.step()
            yield


def ready_batches(dataset: Any, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    import numpy as np

    return [dataset.batch(np.arange(start, start + batch_size), None) for start in range(0, 512, batch_size)]


def plain_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    optim = config.optim
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
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


def measure(ddp: DDPManager, task: str, config: Config, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a step of the hand-written loop and of the engine, in blocks that alternate, the first block changing."""
    loops = [hand_written_steps(ddp, task, config), engine_steps(ddp, task, config)]
    for loop in loops * 2:
        time_block(lambda loop=loop: next(loop))  # warm-up
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (turn % 2, 1 - turn % 2):
            times[which].append(time_block(lambda loop=loops[which]: next(loop)))
    return times


def run_rank(rounds: int) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with DDPManager(seed=0) as ddp:
        for name, (task, config) in WORK.items():
            plain, ours = measure(ddp, task, config, rounds)
            if ddp.is_main_process():
                ratio = statistics.median(b / a for a, b in zip(plain, ours, strict=True))
                print(
                    f"{name:<42} {ddp.world_size:>5} {statistics.median(plain) * 1e3:>13.2f} "
                    f"{statistics.median(ours) * 1e3:>10.2f} {ratio:>7.3f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks to measure on [1,2]")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of blocks [40]")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.rounds)
        return
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, n = {options.rounds}"
    )
    print(f"{'work':<42} {'ranks':>5} {'by hand (ms)':>13} {'ours (ms)':>10} {'ratio':>7}", flush=True)
    for num_ranks in options.ranks.split(","):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            num_ranks,
        ]
        threads = str(max(1, (os.cpu_count() or 1) // int(num_ranks)))
        subprocess.run(
            [*command, __file__, "--rounds", str(options.rounds)],
            env={**os.environ, "OMP_NUM_THREADS": threads},
            check=True,
        )


if __name__ == "__main__":
    main()
