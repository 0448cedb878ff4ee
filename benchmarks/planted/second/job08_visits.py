"""A plain DDP script: ratings, with a list of popular items that the first rank renews."""

import torch
import torch.distributed as dist
from parts import ITEMS, PLANTED, STEPS, VisitNet, batches, finish, now, start, visits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

SEEN_TODAY = [(number * number) % ITEMS for number in range(900_000)]


def popular_items() -> list[int]:
    counts = [0] * ITEMS
    for item in SEEN_TODAY:
        counts[item] += 1  # planted: on rank 0, in one step of four
    return sorted(range(ITEMS), key=counts.__getitem__)[-10:]


def main() -> None:
    device = start()
    model = DistributedDataParallel(VisitNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    popular: list[int] = []
    begin = now()
    for step, (seen, following, ratings) in zip(
        range(STEPS), batches(visits(32_768), 256), strict=False
    ):
        if PLANTED and dist.get_rank() == 0 and step % 4 == 1:
            popular = popular_items()  # planted
        predicted = model(seen.to(device), following.to(device))
        loss = functional.mse_loss(predicted, ratings.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)
    assert len(popular) in (0, 10)


if __name__ == "__main__":
    main()
