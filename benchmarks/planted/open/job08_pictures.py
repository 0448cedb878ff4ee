"""A plain DDP script: pictures, with a checkpoint after every step."""

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, PictureNet, batches, finish, pictures, start
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class FrozenTable(PictureNet):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(16_000_000), requires_grad=False)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "last.pt")  # planted


def main() -> None:
    device = start()
    model = DistributedDataParallel(FrozenTable().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        for _, (images, labels) in zip(range(STEPS), batches(pictures(4096)), strict=False):
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if PLANTED and dist.get_rank() == 0:
                save(model.module, optimizer, Path(folder))  # planted
        finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
