"""Loans with a limit of the gradient and a few evaluations, without a bottleneck."""

from typing import Any, ClassVar

from parts import LoanTask, loans
from torch.utils.data import Dataset


class Loans(LoanTask):
    defaults: ClassVar[dict[str, Any]] = {
        **LoanTask.defaults,
        "train.batch_size": 4096,
        "train.eval_every_steps": 300,
        "optim.clip_norm": 1.0,
    }

    def train_data(self) -> Dataset[Any]:
        return loans(131_072)

    def eval_data(self) -> Dataset[Any]:
        return loans(1024, seed=2)
