"""A plain DDP script: text, with samples that come from a slow volume, read in the training process."""

import time
from typing import Any

import torch
from parts import PLANTED, STEPS, LineNet, batches, finish, line_loss, lines, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset


class SlowLines(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.lines = lines(count)

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Any:
        if PLANTED:
            time.sleep(0.01)  # planted: a volume that answers slowly
        return self.lines[index]


def main() -> None:
    device = start()
    model = DistributedDataParallel(LineNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for _, (tokens,) in zip(range(STEPS), batches(SlowLines(4096)), strict=False):
        loss = line_loss(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
