"""What is trained in the fault matrix: made-up points, a network of a few weights. No Drumline in
it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from tests.multinode.faults.inject import Injection

NUM_SAMPLES = 2048


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, injection: Injection | None) -> None:
        self.inputs = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(5))
        self.targets = (self.inputs.sum(1) > 0).long()
        self.injection = injection

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.injection is not None:
            self.injection.in_dataset(is_worker=get_worker_info() is not None)
        return self.inputs[index], self.targets[index]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
