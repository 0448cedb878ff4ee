"""Adverts, whole batches from arrays, without a bottleneck."""

from typing import Any, ClassVar

import torch
from parts import AdvertTask, adverts
from torch import Tensor

from drumline import BatchDataset


class Views(BatchDataset):
    def __init__(self) -> None:
        self.columns = adverts(131_072).tensors

    def __len__(self) -> int:
        return len(self.columns[0])

    def batch(self, indices: Any, draws: Any) -> tuple[Tensor, ...]:
        chosen = torch.from_numpy(indices)
        return tuple(column[chosen] for column in self.columns)


class Adverts(AdvertTask):
    defaults: ClassVar[dict[str, Any]] = {**AdvertTask.defaults, "train.batch_size": 3072}

    def train_data(self) -> BatchDataset:
        return Views()
