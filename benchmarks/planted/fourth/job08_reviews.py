"""A plain DDP script: reviews, which rank 1 reads from a disk that is slower."""

import time
from typing import Any

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, ReviewNet, batches, finish, now, reviews, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset


class Disk:
    """Stands for the disk of a rank."""

    def __init__(self, rank: int) -> None:
        self.seek_s = 0.006 if rank == 1 else 0.0

    def seek(self) -> None:
        if PLANTED and self.seek_s:
            time.sleep(self.seek_s)  # planted: on rank 1, for each review


class StoredReviews(Dataset[Any]):
    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.words, self.stars = reviews(4096).tensors

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.disk.seek()  # planted
        return self.words[index], self.stars[index]


def main() -> None:
    device = start()
    disk = Disk(dist.get_rank())
    loader = batches(StoredReviews(disk), 28)
    model = DistributedDataParallel(ReviewNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    begin = now()
    for step, (words, stars) in zip(range(STEPS), loader, strict=False):
        loss = functional.cross_entropy(model(words.to(device)), stars.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
