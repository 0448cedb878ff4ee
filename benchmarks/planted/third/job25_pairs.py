"""A plain DDP script: pairs that are compared with those of all ranks, without a bottleneck."""

import torch
import torch.distributed as dist
from parts import STEPS, PairNet, batches, finish, now, pairs, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def of_all_ranks(directions: Tensor) -> Tensor:
    """The directions of all ranks; those of this rank keep their gradient."""
    parts = [torch.empty_like(directions) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, directions.detach())
    parts[dist.get_rank()] = directions
    return torch.cat(parts)


def main() -> None:
    device = start()
    model = DistributedDataParallel(PairNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = batches(pairs(49_152), 384)
    begin = now()
    for _, (first, second) in zip(range(STEPS), loader, strict=False):
        anchors, answers = model(torch.cat([first, second]).to(device)).chunk(2)
        targets = torch.arange(len(first), device=device) + dist.get_rank() * len(first)
        scores = anchors @ of_all_ranks(answers).T / 0.1
        loss = functional.cross_entropy(scores, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
