"""A plain DDP script: pictures, with a second rank that reads new settings now and then."""

import time

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, PictureNet, batches, finish, pictures, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def read_settings(step: int) -> None:
    if PLANTED and dist.get_rank() == 1 and step % 4 == 3:
        time.sleep(0.3)  # planted: one rank, one step of four


def main() -> None:
    device = start()
    model = DistributedDataParallel(PictureNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for step, (images, labels) in zip(range(STEPS), batches(pictures(4096), 4), strict=False):
        read_settings(step)
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
