"""Recordings that are companded when they are read."""

import math
from typing import Any

import torch
from parts import PLANTED, ClipTask, clips
from torch import Tensor
from torch.utils.data import Dataset

STRENGTH = 255.0


def companded(wave: Tensor) -> Tensor:
    scale = math.log1p(STRENGTH)
    values = [
        math.copysign(math.log1p(STRENGTH * abs(value)) / scale, value)  # planted: one by one
        for value in wave[0].tolist()
    ]
    return torch.tensor([values])


class Recordings(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.waves, self.sounds = clips(count, length=6000).tensors
        if not PLANTED:
            loudness = torch.log1p(STRENGTH * self.waves.abs()) / math.log1p(STRENGTH)
            self.waves = self.waves.sign() * loudness

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        wave = companded(self.waves[index]) if PLANTED else self.waves[index]  # planted
        return wave, self.sounds[index]


class Clips(ClipTask):
    def train_data(self) -> Dataset[Any]:
        return Recordings(2048)
