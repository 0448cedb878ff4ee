"""Pictures with a large index of records in memory, and memory that is freed by hand."""

import gc
from typing import Any

from parts import PLANTED, PictureTask, pictures
from torch import nn
from torch.utils.data import Dataset

from drumline import Loss


class Pictures(PictureTask):
    def train_data(self) -> Dataset[Any]:
        self.records = [[number, [number]] for number in range(400_000)]
        return pictures(4096)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if PLANTED:
            gc.collect()  # planted
        return super().loss(model, batch)
