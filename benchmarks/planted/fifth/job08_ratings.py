"""A plain DDP script: ratings of many viewers, few of whom are in a batch."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, RatingNet, batches, finish, now, ratings, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VIEWERS = 150_000
FILMS = 20_000


def network() -> RatingNet:
    return RatingNet(
        users=VIEWERS,  # planted: a gradient of all rows, for the 256 of a batch
        films=FILMS,
        hidden=256,
        sparse=not PLANTED,
    )


def main() -> None:
    device = start()
    data = ratings(32_768, VIEWERS, FILMS)
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begin = now()
    for step, (users, films, liked) in zip(range(STEPS), batches(data, 256), strict=False):
        scores = model(users.to(device), films.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, liked.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
