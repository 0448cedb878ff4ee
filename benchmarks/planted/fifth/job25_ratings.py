"""A plain DDP script: ratings, a batch at a time from arrays, without a bottleneck."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from parts import STEPS, RatingNet, finish, now, ratings, seeded, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 1536


def mixed_batches(columns: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
    """Batches of this rank, in another order in each epoch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    order = seeded(7)
    while True:
        places = torch.randperm(len(columns[0]), generator=order)[rank::ranks]
        for chosen in places.split(BATCH)[:-1]:
            yield [column[chosen] for column in columns]


def main() -> None:
    device = start()
    model = DistributedDataParallel(RatingNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    total = torch.zeros((), device=device)
    begin = now()
    for step, batch in zip(range(STEPS), mixed_batches(ratings(131_072).tensors), strict=False):
        users, films, liked = (column.to(device) for column in batch)
        loss = functional.binary_cross_entropy_with_logits(model(users, films), liked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step}: loss {total.item() / (step + 1):.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
