"""Seismograms of three directions: the class of an earthquake."""

from typing import Any, ClassVar

import torch
from parts import ON_GPU, STEPS, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from drumline import Loss, Task

LENGTH = 6000 if ON_GPU else 400
WIDTH = 256 if ON_GPU else 16
CLASSES = 12


class GatedLayer(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.from_frame = nn.Linear(inputs, 3 * width)
        self.from_state = nn.Linear(width, 3 * width)

    def step(self, frame: Tensor, state: Tensor) -> Tensor:
        kept, passed, candidate = self.from_state(state).chunk(3, dim=1)
        kept_here, passed_here, candidate_here = frame.chunk(3, dim=1)
        reset = torch.sigmoid(kept + kept_here)
        update = torch.sigmoid(passed + passed_here)
        fresh = torch.tanh(candidate_here + reset * candidate)
        return (1 - update) * fresh + update * state

    def forward(self, frames: Tensor) -> Tensor:
        state = frames.new_zeros(len(frames), self.width)
        states = []
        for frame in self.from_frame(frames).unbind(1):  # planted
            state = self.step(frame, state)  # planted
            states.append(state)
        return torch.stack(states, dim=1)


class QuakeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(3, WIDTH, 40, stride=20, padding=10)
        self.recurrent = GatedLayer(WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, CLASSES)

    def forward(self, waves: Tensor) -> Tensor:
        frames = functional.relu(self.frames(waves)).transpose(1, 2)
        return self.scores(self.recurrent(frames).mean(1))


class Quakes(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 256 if ON_GPU else 8,
        "train.step": "eager",
        "train.tf32": "on",
        "checkpoint.every_epochs": 0,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return QuakeNet()

    def train_data(self) -> Dataset[Any]:
        waves = torch.randn(7168 if ON_GPU else 128, 3, LENGTH, generator=seeded(1))
        return TensorDataset(waves, torch.randint(CLASSES, (len(waves),), generator=seeded(2)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        waves, classes = batch
        return Loss(functional.cross_entropy(model(waves), classes, reduction="sum"))
