"""The task of the stored run: points on either side of a plane. With STOP_AT set, the process exits
in that step."""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drumline import Loss, Task


class Points(Task):
    best_metric = "accuracy"
    higher_is_better = True
    calls = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)).double()

    def _points(self, length: int) -> TensorDataset:
        inputs = torch.randn(
            length, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64
        )
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def train_data(self) -> TensorDataset:
        return self._points(37)

    def eval_data(self) -> TensorDataset:
        return self._points(29)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        self.calls += model.training
        if self.calls == int(os.environ.get("STOP_AT", "0")) + 1 > 1:
            os._exit(9)
        scores = model(inputs)
        return Loss(
            functional.cross_entropy(scores, targets, reduction="sum"),
            metrics={"accuracy": (scores.argmax(1) == targets).sum()},
        )
