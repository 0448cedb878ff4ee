"""A plain DDP script: tickets, with an optimizer from a paper, weight after weight."""

import math
from typing import Any

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, TicketNet, batches, finish, now, start, tickets
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

RATE = 0.001
DECAY = 0.01
BETAS = (0.9, 0.99)


def size(values: Tensor) -> float:
    """Length, or the largest number if that is longer."""
    return max(math.sqrt((values * values).sum().item()), values.abs().max().item())


class Paper:
    """AdamW, as its authors wrote it, with the sizes of what it computes for a look at them."""

    def __init__(self, network: nn.Module) -> None:
        self.weights = list(network.parameters())
        self.means = [torch.zeros_like(weight) for weight in self.weights]
        self.squares = [torch.zeros_like(weight) for weight in self.weights]
        self.sizes: list[list[float]] = [[] for _ in self.weights]
        self.steps = 0

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for place, weight in enumerate(self.weights):
            self.update(place, weight, weight.grad)  # planted: one weight at a time

    def update(self, place: int, weight: Tensor, gradient: Any) -> None:
        first, second = BETAS
        mean = first * self.means[place] + (1 - first) * gradient  # planted: new tensors
        square = second * self.squares[place] + (1 - second) * gradient * gradient
        corrected = mean / (1 - first**self.steps)
        deviation = torch.sqrt(square / (1 - second**self.steps)) + 1e-8
        change = RATE * (corrected / deviation + DECAY * weight)
        looked_at = (weight, gradient, mean, square, change)
        self.sizes[place] = [size(values) for values in looked_at]  # planted: item() ten times
        weight.copy_(weight - change)  # planted
        self.means[place], self.squares[place] = mean, square


def main() -> None:
    device = start()
    network = TicketNet(width=32, depth=12).to(device)
    model = DistributedDataParallel(network)
    if PLANTED:
        optimizer: Any = Paper(network)  # planted
    else:
        options = {"lr": RATE, "betas": BETAS, "weight_decay": DECAY, "fused": True}
        optimizer = torch.optim.AdamW(network.parameters(), **options)
    begin = now()
    for step, (tokens, departments) in zip(range(STEPS), batches(tickets(2048), 2), strict=False):
        loss = functional.cross_entropy(model(tokens.to(device)), departments.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
