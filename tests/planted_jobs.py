"""Jobs with one planted bottleneck each, which a profile must name first. It dominates clearly,
also on slow cores."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline import Loss, Task


class Vectors(Dataset[tuple[Tensor, Tensor]]):
    """Random vectors with a class; each takes `load_s` to read, as from slow storage."""

    def __init__(self, width: int, load_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(4096, width, generator=generator)
        self.load_s = load_s

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.load_s:
            time.sleep(self.load_s)
        return self.inputs[index], torch.tensor(index % 4)


class Planted(Task):
    """A small network of `layers` layers without a bottleneck."""

    defaults: ClassVar = {
        "train.steps": 40,
        "train.batch_size": 32,
        "train.step": "eager",
        "optim.lr": 0.01,
        "checkpoint.every_epochs": 0,
        "dist.same_code": False,
    }
    width: int = 256
    layers: int = 4
    passes: int = 0
    """How often each rank computes the hidden layers besides."""
    load_s: float = 0.0
    """Seconds that a sample takes to load."""

    def model(self) -> nn.Module:
        hidden = [self.layer() for _ in range(self.layers)]
        return nn.Sequential(*hidden, nn.Linear(self.width, 4))

    def layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU())

    def train_data(self) -> Dataset[Any]:
        return Vectors(self.width, self.load_s)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        with torch.no_grad():
            for _ in range(self.passes):
                model[:-1](batch[0])
        return Loss(functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"))


class SlowData(Planted):
    """Samples from slow storage."""

    load_s: float = 0.005


class TinyBuckets(Planted):
    """An all-reduce for each of many small parameters."""

    defaults: ClassVar = {**Planted.defaults, "dist.bucket_cap_mb": 0.001}
    width: int = 32
    layers: int = 60


class LargeGradients(Planted):
    """Many bytes of gradients for little computing: a slow link is all that counts."""

    width: int = 1024
    layers: int = 4


class HalfSpeed(Planted):
    """Rank 1 computes everything twice."""

    width: int = 512
    passes: int = 8

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if dist.is_initialized() and dist.get_rank() == 1:
            super().loss(model, batch)
        return super().loss(model, batch)


class ItemEachStep(Planted):
    """`.item()` after every layer, again and again: the host waits for the device, which then waits
    for the host."""

    layers: int = 12
    reads: int = 40

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        hidden = batch[0]
        self.largest = 0.0
        for layer in model:
            hidden = layer(hidden)
            for _ in range(self.reads):
                self.largest = max(self.largest, hidden.detach().abs().max().item())
        return Loss(functional.cross_entropy(hidden, batch[1], reduction="sum"))


class SyncedNorms(Planted):
    """SyncBatchNorm after every layer."""

    defaults: ClassVar = {**Planted.defaults, "dist.sync_batchnorm": True}
    width: int = 128
    layers: int = 30

    def layer(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.width, self.width), nn.BatchNorm1d(self.width), nn.ReLU()
        )
