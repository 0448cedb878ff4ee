"""A plain DDP script: text, with many parsed records, and memory that is freed in each step."""

import gc
import time

import torch
from parts import PLANTED, STEPS, LineNet, batches, finish, line_loss, lines, start
from torch.nn.parallel import DistributedDataParallel


class Record:
    def __init__(self, number: int) -> None:
        self.number = number
        self.neighbours = [number - 1, number + 1]


def main() -> None:
    device = start()
    records = [Record(number) for number in range(80_000)]
    model = DistributedDataParallel(LineNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for _, (tokens,) in zip(range(STEPS), batches(lines(4096)), strict=False):
        loss = line_loss(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if PLANTED:
            del loss
            gc.collect()  # planted
    finish(STEPS, time.perf_counter() - begin)
    assert records


if __name__ == "__main__":
    main()
