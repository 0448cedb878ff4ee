"""Time series, with parts of the measured values that are opened one after the other."""

import pickle
from typing import Any

import torch.distributed as dist
from parts import PLANTED, SeriesTask, series
from torch import Tensor
from torch.utils.data import Dataset

READS_IN_PART = 4 * 32
PART = pickle.dumps([[number, {"value": 0.5 * number}] for number in range(110_000)])


class Parts(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.windows = series(count)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.windows)

    def open_part(self) -> None:
        self.part = pickle.loads(PART)  # planted: on rank 1, in one step of four

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.reads += 1
        if PLANTED and dist.get_rank() == 1 and self.reads % READS_IN_PART == 0:
            self.open_part()  # planted
        return self.windows[index]


class Series(SeriesTask):
    def train_data(self) -> Dataset[Any]:
        return Parts(6144)
