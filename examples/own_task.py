"""Level 2: your own model, data and loss as a Task. Drumline does the rest.

drumline train examples/own_task.py:Spirals --procs 2
"""

from typing import Any, ClassVar

from spirals import Net, spirals
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline import Loss, Task


class Spirals(Task):
    defaults: ClassVar[dict[str, Any]] = {"train.epochs": 5, "train.batch_size": 64, "optim.lr": 0.2}
    best_metric, higher_is_better = "accuracy", True

    def model(self) -> nn.Module:
        return Net()

    def train_data(self) -> Dataset[Any]:
        return spirals(2000, seed=1)

    def eval_data(self) -> Dataset[Any]:
        return spirals(500, seed=2)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        points, arm = batch
        scores = model(points)
        correct = (scores.argmax(1) == arm).sum()
        return Loss(functional.cross_entropy(scores, arm, reduction="sum"), metrics={"accuracy": correct})
