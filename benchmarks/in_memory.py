"""Small work for the CPU, on samples that were made once, so that ways differ in nothing but
themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.work import Batch, Work
from drumline.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from drumline.data.sharding import Draws
from drumline.training.manager import RunManager
from drumline.training.tasks import load_task

SAMPLES = 1024
TINY_SAMPLES = 64
SAVE_EVERY = 50
MINI_RESNET = "MiniResNet 16-32-64, batch 32"
GPT = "GPT 4 layers of 128, batch 8 x 128"
_SAVES = CheckpointConfig(every_steps=SAVE_EVERY, keep_last=2, keep_best=0)
WORK = {
    MINI_RESNET: Config(
        model=ModelConfig(widths=(16, 32, 64)),
        data=DataConfig(name="synthetic_images", samples=SAMPLES),
        optim=OptimConfig(schedule="constant"),
        train=TrainConfig(batch_size=32, epochs=10_000),
        checkpoint=_SAVES,
    ),
    GPT: Config(
        model=ModelConfig(name="gpt"),
        data=DataConfig(name="synthetic_tokens", samples=SAMPLES),
        optim=OptimConfig(name="adamw", lr=1e-3, clip_norm=1.0, schedule="constant"),
        train=TrainConfig(batch_size=8, epochs=10_000),
        checkpoint=_SAVES,
    ),
}
TINY_WORK = {
    "tiny": Config(
        model=ModelConfig(widths=(4,)),
        data=DataConfig(name="synthetic_images", samples=TINY_SAMPLES, image_size=8),
        train=TrainConfig(batch_size=8, epochs=10_000),
        checkpoint=_SAVES,
    )
}


class InMemory:
    """A dataset's samples and its attributes."""

    def __init__(self, dataset: Any) -> None:
        self.inputs, self.targets = dataset.batch(np.arange(len(dataset)), None)
        names = ("in_channels", "num_classes", "vocab_size")
        self.facts = {name: getattr(dataset, name) for name in names if hasattr(dataset, name)}
        vars(self).update(self.facts)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: NDArray[np.int64], draws: Draws | None) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.targets[chosen]


class InMemoryTask(load_task("synthetic")):  # type: ignore[misc]
    """The task `synthetic`, with its samples in memory and nothing to evaluate on."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._samples = InMemory(super().train_data())

    def train_data(self) -> InMemory:
        return self._samples

    def eval_data(self) -> None:
        return None


def plain_work(config: Config, ddp: RunManager) -> Work:
    """The same for a loop by hand: an index is shuffled, each rank takes its part."""
    data = InMemoryTask(config).train_data()
    return Work(
        config, data.facts, ddp.device, _shuffled(data, (config.train.batch_size or 0), ddp)
    )


def _shuffled(data: InMemory, batch_size: int, ddp: RunManager) -> Callable[[], Iterator[Batch]]:
    def epoch() -> Iterator[Batch]:
        order = torch.randperm(len(data))[ddp.rank :: ddp.world_size]
        for chosen in order.split(batch_size // ddp.world_size):
            yield data.inputs[chosen], data.targets[chosen]

    return epoch
