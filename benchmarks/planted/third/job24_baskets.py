"""Baskets with an average of the weights and a few evaluations, without a bottleneck."""

from typing import Any, ClassVar

from parts import BasketTask, baskets
from torch.utils.data import Dataset

from drumline import EMA, Hook


class Baskets(BasketTask):
    defaults: ClassVar[dict[str, Any]] = {
        **BasketTask.defaults,
        "train.batch_size": 768,
        "train.eval_every_steps": 400,
    }

    def train_data(self) -> Dataset[Any]:
        return baskets(65_536)

    def eval_data(self) -> Dataset[Any]:
        return baskets(256, seed=2)

    def hooks(self) -> list[Hook]:
        return [EMA(0.99, every_steps=10)]
