"""Electrocardiograms of twelve leads: the kind of a heart's rhythm."""

from typing import Any, ClassVar

import numpy as np
import torch
from parts import ON_GPU, STEPS, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from drumline import Loss, Task

LEADS = 12
LENGTH = 2500 if ON_GPU else 500
WIDTH = 128 if ON_GPU else 16
RHYTHMS = 9


def as_if_moved(waves: np.ndarray) -> np.ndarray:
    """Other strengths, a baseline that drifts, and the noise of muscles."""
    samples, leads, length = waves.shape
    strength = np.random.uniform(0.8, 1.2, (samples, leads, 1))
    phase = np.random.uniform(0, 2 * np.pi, (samples, leads, 1))
    drift = 0.1 * np.sin(phase + np.linspace(0, 6, length))
    noise = np.random.normal(0, 0.05, waves.shape)
    return (waves * strength + drift + noise).astype(np.float32)


class RhythmNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(LEADS, WIDTH, 15, stride=5, padding=7)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 7, padding=3) for _ in range(6))
        self.scores = nn.Linear(WIDTH, RHYTHMS)

    def forward(self, waves: Tensor) -> Tensor:
        values = functional.relu(self.first(waves))
        for layer in self.layers:
            values = values + functional.relu(layer(values))
        return self.scores(values.mean(2))


class Hearts(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 128 if ON_GPU else 8,
        "train.step": "eager",
        "train.tf32": "on",
        "checkpoint.every_epochs": 0,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return RhythmNet()

    def train_data(self) -> Dataset[Any]:
        count = 4096 if ON_GPU else 64
        waves = torch.randn(count, LEADS, LENGTH, generator=seeded(1))
        return TensorDataset(waves, torch.randint(RHYTHMS, (count,), generator=seeded(2)))

    def on_device(self, batch: Any) -> Any:
        waves, rhythms = batch
        if self.training:
            moved = as_if_moved(waves.cpu().numpy())  # planted
            waves = torch.from_numpy(moved).to(waves.device)  # planted
        return waves, rhythms

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        waves, rhythms = batch
        return Loss(functional.cross_entropy(model(waves), rhythms, reduction="sum"))
