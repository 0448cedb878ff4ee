"""Strain gauges of bridges: which kind of vehicle drives over them."""

from typing import Any, ClassVar

import torch
from parts import ON_GPU, STEPS, seeded
from torch import Tensor, nn
from torch.nn import functional

from drumline import Hook, Loss, Task

GAUGES = 24
LENGTH = 512 if ON_GPU else 64
WIDTH = 64 if ON_GPU else 8
BLOCKS = 16 if ON_GPU else 2
VEHICLES = 7


class UpdateRatios(Hook):
    """How far each weight has moved, by its own size: about 0.001 where the rate is right."""

    def start(self, run: Any) -> None:
        self.before = {
            name: weight.detach().clone() for name, weight in run.model.named_parameters()
        }

    def after_step(self, run: Any) -> None:
        for name, weight in run.model.named_parameters():
            now = weight.detach()
            moved = (now - self.before[name]).norm()  # planted
            ratio = moved / now.norm().clamp_min(1e-12)  # planted
            run.log(f"update/{name}", ratio.item())  # planted
            self.before[name] = now.clone()  # planted


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, WIDTH, 7, padding=3)
        self.first_norm = nn.GroupNorm(8, WIDTH)
        self.second = nn.Conv1d(WIDTH, WIDTH, 7, padding=3)
        self.second_norm = nn.GroupNorm(8, WIDTH)

    def forward(self, strains: Tensor) -> Tensor:
        values = functional.relu(self.first_norm(self.first(strains)))
        return functional.relu(strains + self.second_norm(self.second(values)))


class BridgeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gauges = nn.Conv1d(GAUGES, WIDTH, 7, stride=2, padding=3)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.scores = nn.Linear(WIDTH, VEHICLES)

    def forward(self, strains: Tensor) -> Tensor:
        return self.scores(self.blocks(self.gauges(strains)).mean(2))


class Crossings:
    def __init__(self) -> None:
        self.strains = torch.randn(4096 if ON_GPU else 64, GAUGES, LENGTH, generator=seeded(1))
        self.vehicles = torch.randint(VEHICLES, (len(self.strains),), generator=seeded(2))

    def __len__(self) -> int:
        return len(self.strains)

    def batch(self, indices: Any, draws: Any) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices)
        return self.strains[rows], self.vehicles[rows]


class Bridges(Task):
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
        return BridgeNet()

    def train_data(self) -> Crossings:
        return Crossings()

    def hooks(self) -> list[Hook]:
        return [UpdateRatios()]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        strains, vehicles = batch
        return Loss(functional.cross_entropy(model(strains), vehicles, reduction="sum"))
