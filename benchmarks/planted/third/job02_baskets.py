"""Baskets as counts of all items, which the collate function fills in."""

from typing import Any, ClassVar

import torch
from parts import ITEMS, PLANTED, BasketTask, baskets
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline import Loss


def filled(samples: list[Any]) -> Tensor:
    counts = torch.zeros(len(samples), ITEMS)
    for row, (chosen, _, _) in enumerate(samples):
        for item in chosen:
            counts[row, item] += 1  # planted: one number at a time
    return counts


def scattered(samples: list[Any]) -> Tensor:
    chosen = torch.stack([sample[0] for sample in samples])
    return torch.zeros(len(samples), ITEMS).scatter_add_(1, chosen, torch.ones(chosen.shape))


class Baskets(BasketTask):
    defaults: ClassVar[dict[str, Any]] = {**BasketTask.defaults, "train.batch_size": 256}

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(ITEMS, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 1)
        )

    def train_data(self) -> Dataset[Any]:
        return baskets(20_480)

    @staticmethod
    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        counts = filled(samples) if PLANTED else scattered(samples)  # planted
        return counts, torch.stack([sample[2] for sample in samples])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        counts, bought = batch
        scores = model(counts)[:, 0]
        return Loss(functional.binary_cross_entropy_with_logits(scores, bought, reduction="sum"))
