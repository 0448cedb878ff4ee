"""Recordings of hydrophones: which whale calls in each of them."""

from itertools import pairwise
from typing import Any, ClassVar

import torch
from parts import ON_GPU, STEPS, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline import Loss, Task

CLIP = 32_000 if ON_GPU else 4000
RECORDING = 10 * CLIP
WIDTH = 48 if ON_GPU else 8
SPECIES = 9
CLIPS = 4096 if ON_GPU else 64


class Calls(Dataset[tuple[Tensor, int]]):
    """A random part of a recording, a little faster or slower, as a spectrogram."""

    def __init__(self) -> None:
        self.recordings = torch.randn(32, RECORDING, generator=seeded(1))
        self.species = torch.randint(SPECIES, (32,), generator=seeded(2)).tolist()
        self.window = torch.hann_window(512)

    def __len__(self) -> int:
        return CLIPS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = int(index) % len(self.recordings)
        speed = 0.8 + 0.4 * torch.rand(()).item()
        length = int(CLIP * speed)
        begin = int(torch.randint(RECORDING - length, ()))
        part = self.recordings[number, begin : begin + length]
        stretched = functional.interpolate(part.view(1, 1, -1), CLIP, mode="linear").view(
            -1
        )  # planted
        noisy = stretched + 0.1 * torch.randn(CLIP)  # planted
        spectrum = torch.stft(noisy, 512, 128, window=self.window, return_complex=True)  # planted
        return spectrum.abs().log1p(), self.species[number]  # planted


class CallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [1, WIDTH, 2 * WIDTH, 4 * WIDTH, 4 * WIDTH]
        self.layers = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
            for inputs, outputs in pairwise(widths)
        )
        self.scores = nn.Linear(widths[-1], SPECIES)

    def forward(self, spectra: Tensor) -> Tensor:
        values = spectra.unsqueeze(1)
        for layer in self.layers:
            values = functional.relu(layer(values))
        return self.scores(values.mean((2, 3)))


class Whales(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 96 if ON_GPU else 8,
        "train.step": "eager",
        "train.tf32": "on",
        "checkpoint.every_epochs": 0,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return CallNet()

    def train_data(self) -> Dataset[Any]:
        return Calls()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        spectra, species = batch
        return Loss(functional.cross_entropy(model(spectra), species, reduction="sum"))
