"""A plain DDP script: text, without a bottleneck."""

import time

import torch
from parts import STEPS, LineNet, batches, finish, line_loss, lines, start
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    device = start()
    model = DistributedDataParallel(LineNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for _, (tokens,) in zip(range(STEPS), batches(lines(8192), batch_size=64), strict=False):
        loss = line_loss(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
