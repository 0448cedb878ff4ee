"""A plain DDP script: noisy patches, with a command that copies results elsewhere."""

import subprocess

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, DenoiseNet, batches, finish, now, patches, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

UPLOAD = ["sleep", "0.28"]  # stands for a copy over the network


def publish(losses: list[float]) -> None:
    if PLANTED and losses:
        subprocess.run(UPLOAD, check=True)  # planted: waits for the command


def main() -> None:
    device = start()
    model = DistributedDataParallel(DenoiseNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[float] = []
    loader = batches(patches(4096), 16)
    begin = now()
    for step, (clean,) in zip(range(STEPS), loader, strict=False):
        clean = clean.to(device)
        noisy = clean + 0.3 * torch.randn_like(clean)
        loss = functional.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() != 0:
            continue
        # Rank 0 is the one that others can watch.
        if step % 4 == 2:
            publish(losses)  # planted
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
