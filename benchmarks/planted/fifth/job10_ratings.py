"""Ratings, on machines that are taken away now and then."""

from typing import Any, ClassVar

from parts import PLANTED, RatingNet, RatingTask, ratings
from torch import nn
from torch.utils.data import Dataset

VIEWERS = 60_000


class Ratings(RatingTask):
    defaults: ClassVar[dict[str, Any]] = {
        **RatingTask.defaults,
        "train.batch_size": 512,
        "checkpoint.every_steps": 2 if PLANTED else 0,  # planted: 15 MB, some times in a second
    }

    def model(self) -> nn.Module:
        return RatingNet(users=VIEWERS)

    def train_data(self) -> Dataset[Any]:
        return ratings(65_536, VIEWERS)
