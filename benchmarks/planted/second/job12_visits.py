"""A few ratings, in epochs of two steps, with a test set that is larger than the training set."""

from typing import Any, ClassVar

from parts import PLANTED, VisitTask, visits
from torch.utils.data import Dataset


class Visits(VisitTask):
    defaults: ClassVar[dict[str, Any]] = {
        **VisitTask.defaults,
        "checkpoint.every_epochs": 0,
        "train.eval_every_epochs": 1 if PLANTED else 100,  # planted: every two steps
    }

    def train_data(self) -> Dataset[Any]:
        return visits(1024)

    def eval_data(self) -> Dataset[Any]:
        return visits(8192, seed=2)
