"""A plain DDP script: vibrations, with an update after every sixth batch."""

import torch
from parts import (
    CHANNELS,
    FAULTS,
    PLANTED,
    STEPS,
    WINDOW,
    batches,
    finish,
    now,
    start,
    vibrations,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

EVERY = 6


def network(width: int = 1280) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(CHANNELS * WINDOW, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, FAULTS),
    )


class Trainer:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.model = DistributedDataParallel(network().to(device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batches = 0

    def add(self, windows: Tensor, faults: Tensor) -> None:
        """Adds a batch to the gradients, and updates the weights when there are enough."""
        self.batches += 1
        is_last = self.batches % EVERY == 0
        if is_last or PLANTED:
            self.backward(windows, faults)  # planted: reduces the gradients for each batch
        else:
            with self.model.no_sync():
                self.backward(windows, faults)
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self, windows: Tensor, faults: Tensor) -> None:
        scores = self.model(windows.to(self.device))
        loss = functional.cross_entropy(scores, faults.to(self.device))
        (loss / EVERY).backward()


def main() -> None:
    trainer = Trainer(start())
    loader = batches(vibrations(12_288), 16)
    begin = now()
    for _, (windows, faults) in zip(range(EVERY * STEPS), loader, strict=False):
        trainer.add(windows, faults)
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
