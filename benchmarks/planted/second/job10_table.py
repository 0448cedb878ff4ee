"""A table, with a search for a leak of memory that nobody has turned off."""

import tracemalloc
from typing import Any

from parts import PLANTED, TableTask
from torch import nn
from torch.utils.data import Dataset

from drumline import Loss


class Table(TableTask):
    def train_data(self) -> Dataset[Any]:
        if PLANTED:
            tracemalloc.start()
        return super().train_data()

    def find_leak(self) -> list[str]:
        lines = tracemalloc.take_snapshot().statistics("lineno")  # planted
        return [str(line) for line in lines[:5]]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if PLANTED:
            self._largest = self.find_leak()  # planted
        return super().loss(model, batch)
