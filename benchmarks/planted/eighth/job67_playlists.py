"""Playlists: which track comes next."""

from typing import Any, ClassVar

import torch
from parts import ON_GPU, STEPS, seeded
from torch import Tensor, nn
from torch.nn import functional

from drumline import Loss, Task

CATALOGUE = 400_000 if ON_GPU else 5000
"""All tracks that the label has; playlists have some of them."""
HEARD = CATALOGUE // 20
LENGTH = 40 if ON_GPU else 8
WIDTH = 64 if ON_GPU else 8
NEGATIVES = 512 if ON_GPU else 16


class NextTrack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tracks = nn.Embedding(CATALOGUE, WIDTH)  # planted
        self.listener = nn.GRU(WIDTH, 2 * WIDTH, batch_first=True)
        self.taste = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, played: Tensor, candidates: Tensor) -> Tensor:
        states, _ = self.listener(self.tracks(played))
        return self.taste(states[:, -1]) @ self.tracks(candidates).T


class History:
    def __init__(self) -> None:
        count = 20_000 if ON_GPU else 64
        self.played = torch.randint(HEARD, (count, LENGTH), generator=seeded(1))
        self.following = torch.randint(HEARD, (count,), generator=seeded(2))

    def __len__(self) -> int:
        return len(self.played)

    def batch(self, indices: Any, draws: Any) -> tuple[Tensor, Tensor]:
        rows = torch.as_tensor(indices)
        return self.played[rows], self.following[rows]


class Playlists(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": STEPS,
        "train.batch_size": 512 if ON_GPU else 8,
        "train.step": "eager",
        "train.tf32": "on",
        "checkpoint.every_epochs": 0,
        "optim.name": "adamw",
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return NextTrack()

    def train_data(self) -> History:
        return History()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The right track against some that are the same for all playlists of the batch."""
        played, following = batch
        negatives = torch.randint(HEARD, (NEGATIVES,), device=following.device)
        scores = model(played, torch.cat([following, negatives]))
        right = scores.diagonal().unsqueeze(1)
        scores = torch.cat([right, scores[:, len(following) :]], dim=1)
        labels = torch.zeros_like(following)
        return Loss(functional.cross_entropy(scores, labels, reduction="sum"))
