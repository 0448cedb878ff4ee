"""A plain DDP script on a GPU: large pictures, copied from memory that is not page-locked."""

import time

import torch
from parts import PLANTED, STEPS, finish, start
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 256


def stored_pictures() -> torch.Tensor:
    pictures = torch.rand(2 * BATCH, 3, 224, 224)
    return pictures if PLANTED else pictures.pin_memory()


def main() -> None:
    device = start()
    pictures = stored_pictures()
    labels = torch.randint(10, (BATCH,), device=device)
    layers = [nn.Conv2d(3, 32, 7, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for step in range(STEPS):
        half = pictures[:BATCH] if step % 2 else pictures[BATCH:]
        images = half.to(device, non_blocking=not PLANTED)  # planted
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
