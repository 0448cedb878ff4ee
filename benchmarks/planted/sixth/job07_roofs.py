"""A plain DDP script: roofs, picture by picture, as a larger network needed it."""

import contextlib

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, RoofNet, batches, finish, now, roofs, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 32
AT_ONCE = 1 if PLANTED else BATCH  # planted: memory for many more is free


def split(pictures: Tensor, kinds: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(pictures.split(AT_ONCE), kinds.split(AT_ONCE), strict=True))  # planted


def learn(model: DistributedDataParallel, pictures: Tensor, kinds: Tensor) -> Tensor:
    """Adds up gradients, which are reduced with the last part; returns the mean loss."""
    total = torch.zeros(())
    parts = split(pictures, kinds)
    for number, (some, their_kinds) in enumerate(parts):
        last = number == len(parts) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = functional.cross_entropy(model(some), their_kinds) / len(parts)
            loss.backward()
        total += loss.detach()
    return total


def main() -> None:
    device = start()
    loader = batches(roofs(4096, size=24), BATCH)
    model = DistributedDataParallel(RoofNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    begin = now()
    for step, (pictures, kinds) in zip(range(STEPS), loader, strict=False):
        optimizer.zero_grad()
        loss = learn(model, pictures.to(device), kinds.to(device))
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
