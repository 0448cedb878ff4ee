"""Contrastive pairs, with an optimizer that averages the latest weights."""

from collections import deque
from typing import Any, ClassVar

import torch
from parts import PLANTED, PairTask
from torch import Tensor, nn

WINDOW = 64


class WindowedSGD(torch.optim.SGD):
    """SGD, and the mean of the weights of the latest steps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.latest: dict[Tensor, deque[Tensor]] = {}
        self.means: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def update_mean(self, parameter: Tensor) -> None:
        if not PLANTED:
            mean = self.means.setdefault(parameter, parameter.clone())
            mean.lerp_(parameter, 1 / WINDOW)
            return
        window = self.latest.setdefault(parameter, deque(maxlen=WINDOW))
        window.append(parameter.clone())
        self.means[parameter] = torch.stack(list(window)).mean(0)  # planted: over all 64, each time

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update_mean(parameter)  # planted
        return result


class Pairs(PairTask):
    defaults: ClassVar[dict[str, Any]] = {**PairTask.defaults, "train.batch_size": 128}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return WindowedSGD(model.parameters(), lr=0.01)
