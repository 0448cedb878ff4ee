"""Days of households, in which each hour becomes the nearest entry of a codebook."""

from typing import Any, ClassVar

import torch
from parts import HOUSEHOLDS, PLANTED, MeterTask
from torch import Tensor, nn

ENTRIES = 256
WIDTH = 64


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entries = nn.Parameter(0.1 * torch.randn(ENTRIES, WIDTH))

    def nearest(self, vectors: Tensor) -> Tensor:
        """Numbers of the nearest entries."""
        if PLANTED:
            apart = vectors.unsqueeze(1) - self.entries.unsqueeze(0)  # planted: 12 million numbers
            return apart.square().sum(2).argmin(1)  # planted
        lengths = self.entries.square().sum(1)
        return (lengths - 2 * vectors @ self.entries.t()).argmin(1)

    def forward(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The entries, with gradients of the vectors, and how far they are from them."""
        with torch.no_grad():
            numbers = self.nearest(vectors)  # planted
        chosen = self.entries[numbers]
        far = (chosen - vectors.detach()).square().mean()
        far = far + 0.25 * (chosen.detach() - vectors).square().mean()
        return vectors + (chosen - vectors).detach(), far


class Coded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hours = nn.Sequential(
            nn.Conv1d(1, 32, 9, padding=4), nn.ReLU(), nn.Conv1d(32, WIDTH, 4, stride=4), nn.Tanh()
        )
        self.codebook = Codebook()
        self.after = nn.Sequential(nn.Conv1d(WIDTH, 96, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(96, HOUSEHOLDS)

    def forward(self, days: Tensor) -> Tensor:
        hours = self.hours(days)
        coded, far = self.codebook(hours.transpose(1, 2).flatten(0, 1))
        coded = coded.unflatten(0, (len(days), -1)).transpose(1, 2)
        return self.head(self.after(coded).mean(2)) + far


class Meters(MeterTask):
    defaults: ClassVar[dict[str, Any]] = {**MeterTask.defaults, "train.batch_size": 64}

    def model(self) -> nn.Module:
        return Coded()
