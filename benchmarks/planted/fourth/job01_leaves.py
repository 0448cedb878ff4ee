"""A plain DDP script: photos of leaves from a slow store, with one process that reads them."""

import time
from typing import Any

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, LeafNet, batches, finish, leaves, now, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

ANSWER_S = 0.010  # how long the store takes, whoever asks


class StoredLeaves(Dataset[Any]):
    def __init__(self) -> None:
        self.photos, self.species = leaves(2048).tensors

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(ANSWER_S)  # planted: nobody asks for the next one meanwhile
        return self.photos[index], self.species[index]


def main() -> None:
    device = start()
    workers = 1 if PLANTED else 4
    loader = batches(StoredLeaves(), 20, num_workers=workers)  # planted: one is not enough
    model = DistributedDataParallel(LeafNet(width=12).to(device))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    begin = now()
    for step, (photos, species) in zip(range(STEPS), loader, strict=False):
        loss = functional.cross_entropy(model(photos.to(device)), species.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
