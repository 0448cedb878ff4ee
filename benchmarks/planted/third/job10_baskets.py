"""Baskets, with gradients that are limited tensor by tensor."""

from typing import Any

import torch
from parts import PLANTED, BasketTask
from torch import Tensor, nn


def limit_largest(gradient: Tensor) -> None:
    """No number of a gradient is larger than 99% of them."""
    limit = torch.quantile(gradient.abs().flatten(), 0.99)  # planted: sorts each gradient
    gradient.clamp_(-limit, limit)


class LimitedAdam(torch.optim.AdamW):
    def limit(self, parameters: list[Tensor]) -> None:
        if not PLANTED:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            return
        for parameter in parameters:
            limit_largest(parameter.grad)  # planted

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.limit(parameters)  # planted
        return super().step(closure)


class Baskets(BasketTask):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return LimitedAdam(model.parameters(), lr=0.001)
