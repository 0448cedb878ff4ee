"""A plain DDP script: short reviews, all as long as the longest that there could be."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, WORDS, ReviewNet, batches, finish, now, seeded, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LONGEST = 192


def short_reviews(count: int) -> list[tuple[Tensor, int]]:
    random = seeded(1)
    lengths = torch.randint(16, 57, (count,), generator=random).tolist()
    return [(torch.randint(1, WORDS, (length,), generator=random), 3) for length in lengths]


def filled(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    longest = LONGEST if PLANTED else max(len(words) for words, _ in samples)
    rows = [functional.pad(words, (0, longest - len(words))) for words, _ in samples]  # planted
    return torch.stack(rows), torch.tensor([stars for _, stars in samples])


def main() -> None:
    device = start()
    loader = batches(short_reviews(4096), 16, collate_fn=filled)  # planted
    model = DistributedDataParallel(ReviewNet().to(device))

    # Reviews of today are shorter than those of 2005.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    begin = now()
    for step, (words, stars) in zip(range(STEPS), loader, strict=False):
        loss = functional.cross_entropy(model(words.to(device)), stars.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
