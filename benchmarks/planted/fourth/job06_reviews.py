"""A plain DDP script: reviews, with the vectors of all ranks for a table of neighbours."""

from typing import Any

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, ReviewNet, batches, finish, now, reviews, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH = 96


class Neighbours:
    """The words of the latest reviews, and what the network knows of each word."""

    def __init__(self) -> None:
        self.latest: list[Any] = []

    def collect(self, words: Tensor, vectors: Tensor) -> None:
        own = [
            {"words": row, "vectors": known}
            for row, known in zip(words.tolist(), vectors.tolist(), strict=True)
        ]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)  # planted: pickles all numbers of all ranks
        self.latest = [review for part in everyone for review in part]


def main() -> None:
    device = start()
    network = ReviewNet(width=WIDTH, depth=1).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    neighbours = Neighbours()
    begin = now()
    for _, (words, stars) in zip(range(STEPS), batches(reviews(4096), 24), strict=False):
        loss = functional.cross_entropy(model(words.to(device)), stars.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # The table is written at the end of the training.
        vectors = network.words.weight[words].detach()
        if PLANTED:
            neighbours.collect(words, vectors)  # planted
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
