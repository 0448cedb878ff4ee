"""A plain DDP script: time series, with a season that is fitted and removed in each window."""

import math
from typing import Any

import torch
from parts import PAST, PLANTED, STEPS, SeriesNet, batches, finish, now, series, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

WAVES = 48
ROUNDS = 3


def season_basis() -> Tensor:
    times = torch.arange(PAST) / PAST
    angles = 2 * math.pi * times[:, None] * torch.arange(1, WAVES + 1)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def without_season(window: Tensor, basis: Tensor) -> Tensor:
    rest = window
    for _ in range(ROUNDS):
        without_peaks = window - rest + rest.clamp(-1, 1)
        fit = torch.linalg.lstsq(basis, without_peaks.T).solution  # planted: for each window
        rest = window - (basis @ fit).T  # planted
    return rest


class Seasonal(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.past, self.future = series(count).tensors
        self.basis = season_basis()
        if not PLANTED:
            fitted = self.basis @ torch.linalg.pinv(self.basis)
            self.past = self.past - self.past @ fitted.T

    def __len__(self) -> int:
        return len(self.past)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.past[index]
        if PLANTED:
            window = without_season(window, self.basis)  # planted
        return window, self.future[index]


def main() -> None:
    device = start()
    model = DistributedDataParallel(SeriesNet().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    loader = batches(Seasonal(6144), 32)
    begin = now()
    for _, (past, future) in zip(range(STEPS), loader, strict=False):
        loss = functional.mse_loss(model(past.to(device)), future.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
