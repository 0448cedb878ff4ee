"""Vibrations of a machine, read in order of time by a recurrent network of our own."""

from typing import Any

import torch
from parts import CHANNELS, FAULTS, PLANTED, SensorTask
from torch import Tensor, nn

WIDTH = 48


class Gates(nn.Module):
    """One step in time of a gated recurrent unit."""

    def __init__(self) -> None:
        super().__init__()
        names = ("reset", "renewal", "candidate")
        self.inputs = nn.ModuleDict({name: nn.Linear(CHANNELS, WIDTH) for name in names})
        self.memories = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def forward(self, values: Tensor, memory: Tensor) -> Tensor:
        reset = torch.sigmoid(self.inputs["reset"](values) + self.memories["reset"](memory))
        renewal = torch.sigmoid(self.inputs["renewal"](values) + self.memories["renewal"](memory))
        recalled = reset * self.memories["candidate"](memory)
        candidate = torch.tanh(self.inputs["candidate"](values) + recalled)
        return (1 - renewal) * candidate + renewal * memory


class Recurrent(nn.Module):
    """The same unit as nn.GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = Gates()

    def forward(self, windows: Tensor) -> Tensor:
        memory = windows.new_zeros(len(windows), WIDTH)
        for moment in range(windows.shape[1]):
            memory = self.gates(windows[:, moment], memory)  # planted: 96 times in a forward
        return memory


class Library(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.GRU(CHANNELS, WIDTH, batch_first=True)

    def forward(self, windows: Tensor) -> Tensor:
        return self.unit(windows)[0][:, -1]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Recurrent() if PLANTED else Library()
        self.head = nn.Linear(WIDTH, FAULTS)

    def forward(self, windows: Tensor) -> Tensor:
        return self.head(self.memory(windows.transpose(1, 2)))


class Vibrations(SensorTask):
    def model(self) -> nn.Module:
        return Classifier()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
