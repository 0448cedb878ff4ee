"""A loop with DDPManager: time series with a test at the end, without a bottleneck."""

from typing import Any

import torch
from parts import STEPS, SeriesNet, now, report, series
from torch import nn
from torch.nn import functional

from drumline import DDPManager


@torch.no_grad()
def test_error(model: nn.Module, loader: Any, ddp: DDPManager) -> float:
    sums = torch.zeros(2, device=ddp.device)
    for past, future in loader:
        sums[0] += functional.mse_loss(model(past), future) * len(past)
        sums[1] += len(past)
    ddp.sum(sums)
    return float(sums[0] / sums[1])


def main() -> None:
    with DDPManager(seed=0) as ddp:
        loader = ddp.loader(series(128 * STEPS), batch_size=96)
        test_loader = ddp.loader(series(64, seed=2), batch_size=32, train=False)
        model = ddp.wrap(SeriesNet())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        begin = now()
        for _, (past, future) in zip(range(STEPS), loader, strict=False):
            loss = functional.mse_loss(model(past), future) * loader.scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(STEPS, now() - begin)
        test_error(ddp.unwrap(model), test_loader, ddp)


if __name__ == "__main__":
    main()
