"""A loop with DDPManager: a few meshes, in epochs of three steps, each with a test."""

from typing import Any

import torch
from parts import PLANTED, STEPS, MeshNet, meshes, now, report
from torch import nn
from torch.nn import functional

from drumline import DDPManager

TEST_EVERY = 1 if PLANTED else 100  # planted: epochs of three steps


def node_loss(model: nn.Module, values: Any, classes: Any) -> Any:
    return functional.cross_entropy(model(values).flatten(0, 1), classes.flatten())


@torch.no_grad()
def tested(model: nn.Module, loader: Any, ddp: DDPManager) -> float:
    sums = torch.zeros(2, device=ddp.device)
    for values, classes in loader:
        sums[0] += node_loss(model, values, classes) * len(values)  # planted
        sums[1] += len(values)
    ddp.sum(sums)
    return float(sums[0] / sums[1])


def main() -> None:
    with DDPManager(seed=0) as ddp:
        loader = ddp.loader(meshes(192), batch_size=64)
        test_loader = ddp.loader(meshes(512, seed=2), batch_size=64, train=False)
        model = ddp.wrap(MeshNet())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        begin = now()
        for epoch in range(1, STEPS // 3 + 1):
            for values, classes in loader:
                loss = node_loss(model, values, classes) * loader.scale
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if epoch % TEST_EVERY == 0:
                tested(ddp.unwrap(model), test_loader, ddp)  # planted
        report(STEPS // 3 * 3, now() - begin)


if __name__ == "__main__":
    main()
