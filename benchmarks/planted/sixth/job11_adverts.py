"""Adverts, with clicks and views by group of adverts, over all ranks."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from parts import PLANTED, AdvertNet, AdvertTask
from torch import Tensor, nn
from torch.nn import functional

from drumline import Hook, Loss

GROUPS = 64


class Counts:
    """Views, clicks and expected clicks of each group in the latest batch of this rank."""

    def __init__(self) -> None:
        self.table = torch.zeros(3, GROUPS)

    def set(self, shown: Tensor, clicked: Tensor, scores: Tensor) -> None:
        rows = torch.stack([torch.ones_like(clicked), clicked, scores.detach().sigmoid()])
        self.table = torch.zeros(3, GROUPS).index_add(1, shown % GROUPS, rows)


class Rates(Hook):
    """The rate of clicks of each group, over all ranks."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def after_step(self, run: Any) -> None:
        views, clicks, expected = self.summed(self.counts.table)
        if run.step % 20 == 0:
            run.log("clicks", (clicks / views.clamp(min=1)).mean())
            run.log("expected", (expected / views.clamp(min=1)).mean())

    def summed(self, table: Tensor) -> Tensor:
        if not PLANTED:
            dist.all_reduce(table)
            return table
        for row in table:
            for number in row:
                dist.all_reduce(number)  # planted: 192 times a step
        return table


class Adverts(AdvertTask):
    defaults: ClassVar[dict[str, Any]] = {**AdvertTask.defaults, "train.batch_size": 512}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.counts = Counts()

    def model(self) -> nn.Module:
        return AdvertNet(hidden=256)

    def hooks(self) -> list[Hook]:
        return [Rates(self.counts)]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        people, shown, numbers, clicked = batch
        scores = model(people, shown, numbers)
        self.counts.set(shown, clicked, scores)
        return Loss(functional.binary_cross_entropy_with_logits(scores, clicked, reduction="sum"))
