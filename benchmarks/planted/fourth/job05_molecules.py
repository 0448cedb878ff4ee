"""A plain DDP script: molecules, with many messages in a narrow network."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, MoleculeNet, batches, calmed, finish, molecules, now, start
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BUCKET_MB = 0.002 if PLANTED else 25  # planted: was tuned for another network


def distributed(network: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(network, bucket_cap_mb=BUCKET_MB)  # planted


def main() -> None:
    device = start()
    model = distributed(calmed(MoleculeNet(width=32, depth=64)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = batches(molecules(2048), 4)
    begin = now()
    for step, (features, bonds, energies) in zip(range(STEPS), loader, strict=False):
        guesses = model(features.to(device), bonds.to(device))
        loss = functional.mse_loss(guesses, energies.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
