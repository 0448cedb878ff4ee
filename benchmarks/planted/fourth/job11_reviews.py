"""Reviews, with an encoder that keeps its weights while the last layer learns."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, ReviewNet, ReviewTask
from torch import nn


class Reviews(ReviewTask):
    defaults: ClassVar[dict[str, Any]] = {**ReviewTask.defaults, "train.batch_size": 64}

    def model(self) -> nn.Module:
        network = ReviewNet(width=128)
        if not PLANTED:
            network.requires_grad_(False)
            network.head.requires_grad_(True)
        return network

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        encoder = [*model.words.parameters(), *model.layers.parameters()]
        groups = [{"params": model.head.parameters(), "lr": 0.01}]
        if PLANTED:
            groups.append({"params": encoder, "lr": 0.0})  # planted: computed, and not used
        return torch.optim.SGD(groups, lr=0.01)
