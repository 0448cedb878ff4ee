"""Ratings, with an optimizer that limits the weights of each unit."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, RatingNet, RatingTask
from torch import Tensor, nn

LARGEST = 1.5


class Limited(torch.optim.SGD):
    """No unit's weights become longer than 1.5."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.dim() == 2:
                    self.limit(weight)  # planted: matrix after matrix
        return result

    def limit(self, weight: Tensor) -> None:
        if not PLANTED:
            lengths = weight.norm(dim=1, keepdim=True).clamp(min=1e-6)
            weight.mul_((LARGEST / lengths).clamp(max=1.0))
            return
        for unit in weight:
            length = float(unit.norm())  # planted: row after row
            if length > LARGEST:
                unit.mul_(LARGEST / length)


class Ratings(RatingTask):
    defaults: ClassVar[dict[str, Any]] = {**RatingTask.defaults, "train.batch_size": 512}

    def model(self) -> nn.Module:
        return RatingNet(hidden=384, depth=2)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Limited(model.parameters(), lr=0.01, momentum=0.9)  # planted
