"""Ratings, with the area under the curve of all ratings so far."""

from typing import Any, ClassVar

from parts import PLANTED, RatingNet, RatingTask, ratings
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline import Hook, Loss


class History:
    """Every score that the network gave, and what the viewer said."""

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def add(self, scores: Tensor, liked: Tensor) -> None:
        self.pairs += zip(scores.detach().tolist(), liked.tolist(), strict=True)

    def area(self) -> float:
        """Area under the curve, by the ranks of those who liked the film."""
        ordered = sorted(self.pairs)  # planted: from the first step on
        ranks = [place for place, (_, liked) in enumerate(ordered, 1) if liked]  # planted
        others = len(ordered) - len(ranks)
        if not ranks or not others:
            return 0.5
        return (sum(ranks) - len(ranks) * (len(ranks) + 1) / 2) / (len(ranks) * others)


class Area(Hook):
    every_steps = 1 if PLANTED else 1000

    def __init__(self, history: History) -> None:
        self.history = history

    def after_step(self, run: Any) -> None:
        run.log("area", self.history.area())  # planted: in every step


class Ratings(RatingTask):
    defaults: ClassVar[dict[str, Any]] = {**RatingTask.defaults, "train.batch_size": 8192}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.history = History()

    def model(self) -> nn.Module:
        return RatingNet(hidden=64, depth=1)

    def train_data(self) -> Dataset[Any]:
        return ratings(524_288)

    def hooks(self) -> list[Hook]:
        return [Area(self.history)]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        users, films, liked = batch
        scores = model(users, films)
        self.history.add(scores, liked)
        return Loss(functional.binary_cross_entropy_with_logits(scores, liked, reduction="sum"))
