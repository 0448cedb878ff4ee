"""What `--data.balance auto` brings when one of the ranks is at half the speed of the others.

    make bench-balance         (or: python -m benchmarks.uneven_ranks --steps 200 --rounds 5)

A GPU is planted: in each forward pass a rank sleeps for 5 ms a sample, the slow one for 10 ms, so
that the result hardly depends on what else runs on this machine. Runs with equal shards and with
shards by speed take turns. The speed of a run is the median of its log lines after step 30, when
the sizes have been chosen; the loss is that of the evaluation at the end.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline import Loss
from drumline.runs.events import read_events
from drumline.training.tasks.built_in import LanguageModel

ROOT = Path(__file__).parents[1]
CHOSEN_AT = 30
SAMPLE_S = 0.005


class HalfSpeedText(LanguageModel):
    """A small GPT on the source of Python; the last rank takes twice as long for a sample."""

    defaults: ClassVar[dict[str, Any]] = {
        "model.name": "gpt",
        "model.layers": 1,
        "model.width": 64,
        "model.context": 32,
        "data.name": "tokens",
        "optim.name": "adamw",
        "optim.lr": 2e-3,
        "optim.clip_norm": 1.0,
        "optim.warmup_steps": 10,
        "train.batch_size": 24,
        "train.eval_every_epochs": 0,
        "checkpoint.every_epochs": 0,
        "dist.threads": 1,
        "watch.sidecar": "off",
        "log.display": "none",
    }

    def eval_data(self) -> Any:
        data = super().eval_data()
        data._rows = data._rows[:1024]  # enough for the loss, and faster
        return data

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if self.training:
            is_slow = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
            time.sleep(len(batch[0]) * SAMPLE_S * (2 if is_slow else 1))
        return super().loss(model, batch)


def train(
    run: Path, balance: str, *, procs: int, steps: int
) -> tuple[float, float, list[int] | None]:
    """One run: samples a second, the loss at the end, and the sizes of its shards if they were
    chosen."""
    words = [
        "--procs",
        str(procs),
        "--train.steps",
        str(steps),
        "--data.balance",
        balance,
        "--run",
        str(run),
    ]
    task = f"{Path(__file__)}:HalfSpeedText"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "drumline", "train", task, *words], env=environment, check=True
    )
    events = list(read_events(run / "events" / "rank-00000.jsonl"))
    speeds = [
        event["samples_per_s"]
        for event in events
        if event["kind"] == "train" and event["step"] > CHOSEN_AT
    ]
    (end,) = (event for event in events if event["kind"] == "end")
    sizes = [event["shard_sizes"] for event in events if "shard_sizes" in event]
    return statistics.median(speeds), end["metrics"]["loss"], sizes[-1] if sizes else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--procs", type=int, default=2, help="ranks [2]")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of each run [80]")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind [3]")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, Linux {platform.release()}"
    print(f"{machine}, torch {torch.__version__}, Python {platform.python_version()}")
    print(
        f"GPT 1 layer of 64 on text, batch 24 x 32, {options.steps} steps, {options.procs} ranks, one at half speed"
    )
    print("data.balance    samples/s     loss   shard sizes", flush=True)
    speeds_by_balance: dict[str, list[float]] = {"off": [], "auto": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            for balance, speeds in speeds_by_balance.items():
                run = Path(scratch) / f"{balance}-{number}"
                speed, loss, sizes = train(run, balance, procs=options.procs, steps=options.steps)
                speeds.append(speed)
                print(f"{balance:<12} {speed:>12.1f} {loss:>8.4f}   {sizes or 'equal'}", flush=True)
    ratio = statistics.median(speeds_by_balance["auto"]) / statistics.median(
        speeds_by_balance["off"]
    )
    best = 2 * (options.procs - 0.5) / options.procs
    print(
        f"auto is {ratio:.2f} times as fast; {best:.2f} if all of a step's time were proportional to its samples"
    )


if __name__ == "__main__":
    main()
