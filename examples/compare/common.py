"""What the scripts share, and no line count includes: data, networks, and how run.py gets a result."""

import json
import math
import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(os.environ.get("COMPARE_FOLDER", "runs/compare"))
"""Where a script keeps its checkpoints, and `show` its result."""
KILL_AT = int(os.environ.get("COMPARE_KILL_AT", "0"))
"""The training pass of a network in which its rank is killed with SIGKILL, counted from 1; 0: never."""
EARLY = 5


class Samples(Dataset[dict[str, Tensor]]):
    """Samples as dicts of tensors, which all four libraries take."""

    def __init__(self, **columns: list[Tensor] | Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def spirals(num_points: int, seed: int) -> Samples:
    """Points on three interleaved spirals, which overlap a little."""
    random = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (num_points,), generator=random)
    radius = torch.rand(num_points, generator=random)
    angle = 2.1 * arm + 5.0 * radius + 0.3 * torch.randn(num_points, generator=random)
    return Samples(points=torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels=arm)


def sentences(count: int, seed: int) -> Samples:
    """3 to 40 tokens each; the next token follows from the one before, but for every fifth or so."""
    random = torch.Generator().manual_seed(seed)
    tokens = []
    for length in torch.randint(4, 42, (count,), generator=random).tolist():
        draws = torch.randint(50, (length,), generator=random)
        for index in range(1, length):
            if torch.rand((), generator=random) < 0.8:
                draws[index] = (3 * draws[index - 1] + 1) % 50
        tokens.append(draws)
    return Samples(tokens=[one[:-1] for one in tokens], labels=[one[1:] for one in tokens])


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of sentences. Labels are padded with -100, which torch's losses and the Trainer leave out."""
    return {
        name: pad_sequence([one[name] for one in samples], batch_first=True, padding_value=padding)
        for name, padding in (("tokens", 0), ("labels", -100))
    }


def ring(count: int) -> Samples:
    """Points near the unit circle."""
    random = torch.Generator().manual_seed(1)
    angle, radius = (2 * math.pi * torch.rand(count, generator=random), 1 + 0.05 * torch.randn(count, generator=random))
    return Samples(points=torch.stack([radius * angle.cos(), radius * angle.sin()], 1))


class Killable(nn.Sequential):
    """Layers that kill their rank in the training pass `COMPARE_KILL_AT`, and note the weights of an early pass, which
    show whether a script resumed or started over."""

    passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if self.passes == KILL_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.passes == EARLY and RANK == 0:
                (FOLDER / "early.json").write_text(json.dumps(next(self.parameters()).sum().item()))
        return super().forward(inputs)


class Net(Killable):
    """Classifies points of `spirals`."""

    def __init__(self, dropout: float = 0.0) -> None:
        hidden = [nn.Linear(2, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*hidden, nn.Linear(64, 3))


class Words(Killable):
    """Scores for the token after each token of `sentences`."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(50, 32), nn.Linear(32, 50))


class Generator(Killable):
    """Points from noise. Notes its first noise, for run.py to compare across ranks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and not self.passes:
            (FOLDER / f"noise-{RANK}.json").write_text(json.dumps(inputs[0].tolist()))
        return super().forward(inputs)


class Critic(nn.Sequential):
    """A score for each point: is it real?"""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def show(model: nn.Module, **numbers: float | Tensor) -> None:
    """Leave the weights and the numbers of a finished script for run.py. Call it on every rank."""
    if RANK == 0:
        torch.save(model.state_dict(), FOLDER / "weights.pt")
        (FOLDER / "numbers.json").write_text(json.dumps({name: float(value) for name, value in numbers.items()}))
