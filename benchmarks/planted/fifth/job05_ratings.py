"""Ratings with a deep network, whose gradients were once NaN."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, RatingNet, RatingTask
from torch import Tensor, nn
from torch.nn import functional


class DeepRatingNet(RatingNet):
    """Layers with a norm and a gate, each with little to compute."""

    def __init__(self) -> None:
        super().__init__(hidden=48, depth=40)
        self.norms = nn.ModuleList(nn.LayerNorm(48) for _ in self.layers)
        self.gates = nn.ParameterList(torch.full((48,), 0.1) for _ in self.layers)

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        known = torch.cat([self.users(users), self.films(films)], dim=1)
        hidden = functional.relu(self.first(known))
        for layer, norm, gate in zip(self.layers, self.norms, self.gates, strict=True):
            hidden = hidden + gate * functional.relu(layer(norm(hidden)))
        return self.last(hidden)[:, 0]


class Ratings(RatingTask):
    defaults: ClassVar[dict[str, Any]] = {
        **RatingTask.defaults,
        "train.batch_size": 256,
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        if PLANTED:
            torch.autograd.set_detect_anomaly(True)  # planted: checks each gradient of each step
        return DeepRatingNet()
