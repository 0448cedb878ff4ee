"""A plain DDP script: ratings in eight micro-batches a step."""

import contextlib

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, RatingNet, batches, finish, now, ratings, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

PARTS = 8


def add_gradients(model: nn.Module, columns: tuple[Tensor, ...], device: torch.device) -> None:
    users, films, liked = (column.to(device) for column in columns)
    loss = functional.binary_cross_entropy_with_logits(model(users, films), liked)
    (loss / PARTS).backward()


def main() -> None:
    device = start()
    model = DistributedDataParallel(RatingNet(hidden=1024, depth=3).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = batches(ratings(65_536), 256)
    begin = now()
    for step, batch in zip(range(STEPS), loader, strict=False):
        optimizer.zero_grad()
        parts = zip(*(column.chunk(PARTS) for column in batch), strict=True)
        for number, columns in enumerate(parts):
            waits = number < PARTS - 1 and not PLANTED
            with model.no_sync() if waits else contextlib.nullcontext():
                add_gradients(model, columns, device)  # planted: reduces them eight times

        # One update for all of them, which is
        # that of a batch of 256.
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
