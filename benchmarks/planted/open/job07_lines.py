"""A plain DDP script: text, with a validation loss after every third step."""

import time

import torch
from parts import PLANTED, STEPS, LineNet, batches, finish, line_loss, lines, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VALIDATE_EVERY = 3  # planted: far too often


@torch.no_grad()
def validate(model: nn.Module, device: torch.device) -> float:
    model.eval()
    losses = [line_loss(model, tokens.to(device)) for (tokens,) in batches(lines(256, seed=2))]
    model.train()
    return float(torch.stack(losses).mean())


def main() -> None:
    device = start()
    model = DistributedDataParallel(LineNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for step, (tokens,) in zip(range(STEPS), batches(lines(4096)), strict=False):
        loss = line_loss(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if PLANTED and step % VALIDATE_EVERY == 0:
            validate(model.module, device)  # planted
    finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
