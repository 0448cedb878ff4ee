"""A plain DDP script: molecules, with a validation on rank 0 while the other rank waits."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, MoleculeNet, batches, finish, molecules, now, start
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

EVERY = 4


class Best:
    """The lowest error so far."""

    def __init__(self) -> None:
        self.error = float("inf")
        self.loader = DataLoader(held_out(), 256)

    @torch.no_grad()
    def look(self, network: nn.Module) -> None:
        network.eval()
        total = 0.0
        for features, bonds, energies in self.loader:
            guesses = network(features, bonds)  # planted
            total += functional.mse_loss(guesses, energies, reduction="sum").item()
        network.train()
        self.error = min(self.error, total)


def held_out() -> TensorDataset:
    return molecules(4608, seed=2)


def main() -> None:
    device = start()
    network = MoleculeNet().to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    best = Best()
    loader = batches(molecules(12_288), 128)
    begin = now()
    for step, (features, bonds, energies) in zip(range(STEPS), loader, strict=False):
        guesses = model(features.to(device), bonds.to(device))
        loss = functional.mse_loss(guesses, energies.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() != 0:
            continue
        # One rank is enough for it.
        if (PLANTED and step % EVERY == 1) or step == STEPS - 1:
            best.look(network)  # planted
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
