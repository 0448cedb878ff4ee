"""Recordings for a GPU, with an echo that is added when they are read."""

from typing import Any, ClassVar

import torch
from parts import ON_GPU, PLANTED, ClipNet, ClipTask, clips
from torch import Tensor, nn
from torch.utils.data import Dataset

DELAY = 400


def with_echo(wave: Tensor) -> Tensor:
    values = wave[0].tolist()
    for place in range(DELAY, len(values)):
        values[place] += 0.4 * values[place - DELAY]  # planted: one by one
    return torch.tensor([values])


class Halls(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.waves, self.sounds = clips(count, length=16_000 if ON_GPU else 4000).tensors

    def __len__(self) -> int:
        return 16_384

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        index %= len(self.waves)
        wave = with_echo(self.waves[index]) if PLANTED else self.waves[index]  # planted
        return wave, self.sounds[index]


class Clips(ClipTask):
    defaults: ClassVar[dict[str, Any]] = {
        **ClipTask.defaults,
        "train.batch_size": 256 if ON_GPU else 32,
        "train.step": "eager",
    }

    def model(self) -> nn.Module:
        return ClipNet(width=256 if ON_GPU else 32)

    def train_data(self) -> Dataset[Any]:
        return Halls(1024)
