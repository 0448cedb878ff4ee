"""The step alone: a small model, so that what is not arithmetic shows. Batches are on the device
for everyone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness import Taken, Way, measure
from benchmarks.options import Options
from benchmarks.paused_loop import AfterStep
from benchmarks.report import Goal, Row, Table, peer_versions, ratio
from benchmarks.ways.by_hand import by_hand
from benchmarks.ways.ours import engine_steps, steps_of
from benchmarks.ways.peers import peers
from benchmarks.work import Batch, Endless, Work
from drumline.config.schema import Config, ModelConfig, OptimConfig, TrainConfig
from drumline.data.sharding import Draws
from drumline.training.manager import RunManager
from drumline.training.tasks import ImageClassification
from drumline.watch.heartbeat import Phase

NUM_BATCHES = 16
GOAL_MS = 1.0
GOAL_PEER = 7.0
KINDS = ("eager", "graph", "compiled_graph")


class Images:
    """Random images in memory; the loader plans its steps over them."""

    in_channels = 3
    num_classes = 10

    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 3, 32, 32)
        self.labels = torch.randint(0, 10, (count,))

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: NDArray[np.int64], draws: Draws | None) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices)
        return self.images[chosen], self.labels[chosen]


def make(options: Options, ddp: RunManager) -> Table:
    size = 8 if options.tiny else 64
    config = _config(size, (4,) if options.tiny else (16, 32, 64), ddp.device)
    images = Images(size * NUM_BATCHES)
    batches = _on_device(images, size, ddp.device)
    work = Work(config, {"in_channels": 3, "num_classes": 10}, ddp.device, lambda: Endless(batches))
    our_ways = [_ours(ddp, steps_of(config, kind), images, batches) for kind in _kinds(ddp.device)]
    ways = [Way("by hand, eager", partial(by_hand, work)), *peers(work), *our_ways]
    chosen = [way for way in ways if options.wants(way.name)]
    rounds = options.rounds_or(7)
    steps = 3 if options.tiny else 100
    taken = measure(chosen, rounds=rounds, steps=steps, warm_up=3 if options.tiny else 30)
    return _table(
        taken,
        config,
        f"n = {rounds} blocks of {steps} steps, in turn in one process under DDP; medians",
    )


def _config(size: int, widths: tuple[int, ...], device: torch.device) -> Config:
    is_cuda = device.type == "cuda"
    return Config(
        model=ModelConfig(name="mini_resnet", widths=widths, blocks=1),
        optim=OptimConfig(name="sgd", lr=0.1, schedule="constant"),
        train=TrainConfig(
            batch_size=size,
            epochs=10**6,
            precision="bf16" if is_cuda else "fp32",
            cudnn_benchmark=is_cuda,
        ),
    )


def _kinds(device: torch.device) -> tuple[str, ...]:
    return KINDS if device.type == "cuda" else KINDS[:1]


def _on_device(images: Images, size: int, device: torch.device) -> list[Batch]:
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    return [
        (inputs.to(device, memory_format=layout), labels.to(device))
        for inputs, labels in zip(images.images.split(size), images.labels.split(size), strict=True)
    ]


def _ours(ddp: RunManager, config: Config, images: Images, batches: list[Batch]) -> Way:
    class Task(ImageClassification):
        def train_data(self) -> Any:
            return images

        def eval_data(self) -> Any:
            return None

    def run(after_step: AfterStep) -> None:
        for samples in engine_steps(ddp, config, Task(config), batches):
            after_step(samples)

    start = partial(ddp.connection.heartbeat.mark, Phase.START)
    return Way(f"ours, {str(config.train.step).replace('_', ' ')}", run, rest=start)


def _table(taken: list[Taken], config: Config, how: str) -> Table:
    rows = [
        Row(way.name, [seconds * 1e3 for seconds in way.per_step()], way.failure) for way in taken
    ]
    widths = "-".join(map(str, config.model.widths))
    title = f"step: MiniResNet {widths} x1, batch {config.train.batch_size}, batches on the device"
    table = Table("step", title, "ms a step", rows, how)
    our_rows = [row for row in rows if row.way.startswith("ours") and row.values]
    best = min(our_rows, key=lambda row: row.median) if our_rows else None
    goals = [
        Goal("ours, the best, ms a step", best.median if best else None, at_most=GOAL_MS),
        Goal("Lightning / ours", ratio(table.row("Lightning"), best), at_least=GOAL_PEER),
    ]
    return replace(table, goals=goals, notes=peer_versions())
