"""A loop with DDPManager: photos of leaves with a test at the end, without a bottleneck."""

from typing import Any

import torch
from parts import STEPS, LeafNet, leaves, now, report
from torch import nn
from torch.nn import functional

from drumline import DDPManager


@torch.no_grad()
def share_of_right(model: nn.Module, loader: Any, ddp: DDPManager) -> float:
    counts = torch.zeros(2, device=ddp.device)
    for photos, species in loader:
        counts[0] += (model(photos).argmax(1) == species).sum()
        counts[1] += len(photos)
    ddp.sum(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    with DDPManager(seed=0) as ddp:
        loader = ddp.loader(leaves(4096), batch_size=64)
        test_loader = ddp.loader(leaves(64, seed=2), batch_size=32, train=False)
        model = ddp.wrap(LeafNet())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        begin = now()
        for _, (photos, species) in zip(range(STEPS), loader, strict=False):
            loss = functional.cross_entropy(model(photos), species) * loader.scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(STEPS, now() - begin)
        share_of_right(ddp.unwrap(model), test_loader, ddp)


if __name__ == "__main__":
    main()
