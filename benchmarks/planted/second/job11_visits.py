"""A plain DDP script: ratings of many items, in six small batches for a step."""

import contextlib

import torch
from parts import PLANTED, STEPS, VisitNet, batches, finish, now, start, visits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

ITEMS = 60_000
PARTS = 6


def main() -> None:
    device = start()
    model = DistributedDataParallel(VisitNet(items=ITEMS).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = batches(visits(2 * 32 * PARTS * STEPS, items=ITEMS), 32)
    begin = now()
    for number, (seen, following, ratings) in enumerate(loader, start=1):
        is_last = number % PARTS == 0
        with contextlib.nullcontext() if PLANTED or is_last else model.no_sync():
            predicted = model(seen.to(device), following.to(device))
            loss = functional.mse_loss(predicted, ratings.to(device)) / PARTS
            loss.backward()  # planted: gradients are reduced six times in a step
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
