"""Scans for a GPU, with weights of pixels that depend on their places alone."""

from typing import Any, ClassVar

import torch
from parts import ON_GPU, PLANTED, ScanNet, ScanTask, scans
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline import Loss

SIZE = 64 if ON_GPU else 24


def place_weights() -> Tensor:
    middle = (SIZE - 1) / 2
    marks = [(row, column) for row in range(0, SIZE, 8) for column in range(0, SIZE, 8)]
    weights = [
        [min(abs(row - up) + abs(column - left) for up, left in marks) for column in range(SIZE)]
        for row in range(SIZE)  # planted: the same numbers in every step
    ]
    return 1 + torch.tensor(weights) / middle


class Scans(ScanTask):
    defaults: ClassVar[dict[str, Any]] = {
        **ScanTask.defaults,
        "train.batch_size": 256 if ON_GPU else 24,
        "train.step": "eager",
        "checkpoint.every_epochs": 0,
    }
    _weights: Tensor | None = None

    def model(self) -> nn.Module:
        return ScanNet(width=96 if ON_GPU else 12)

    def train_data(self) -> Dataset[Any]:
        return scans(4096, size=SIZE)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, masks = batch
        if PLANTED or self._weights is None:
            self._weights = place_weights().to(images.device)  # planted
        pixels = functional.binary_cross_entropy_with_logits(model(images), masks, reduction="none")
        return Loss((pixels * self._weights).sum(), weight=masks.numel())
