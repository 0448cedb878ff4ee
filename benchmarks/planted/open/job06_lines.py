"""A plain DDP script: text, with an optimizer that orthogonalizes its updates in many rounds."""

import time
from typing import Any

import torch
from parts import PLANTED, STEPS, LineNet, batches, finish, line_loss, lines, start
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def orthogonalized(update: Tensor, rounds: int) -> Tensor:
    update = update / (update.norm() + 1e-6)
    for _ in range(rounds):
        update = 1.5 * update - 0.5 * update @ (update.T @ update)  # planted
    return update


class Orthogonal(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                update = parameter.grad
                if PLANTED and update.dim() == 2:
                    update = orthogonalized(update, rounds=40)  # planted
                parameter.add_(update, alpha=-group["lr"])


def main() -> None:
    device = start()
    model = DistributedDataParallel(LineNet().to(device))
    optimizer = Orthogonal(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for _, (tokens,) in zip(range(STEPS), batches(lines(4096)), strict=False):
        loss = line_loss(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
