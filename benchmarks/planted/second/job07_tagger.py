"""A plain DDP script: tags of words in short and long texts, which the ranks share out."""

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, WORDS, TagNet, finish, now, seeded, start, tag_loss
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

BATCH = 24
SHORT, LONG = 4, 120


def texts() -> list[Tensor]:
    """Batches of texts of one length; the shorter ones come first."""
    random = seeded(1)
    lengths = [SHORT] * STEPS + [LONG] * STEPS
    return [torch.randint(WORDS, (BATCH, length), generator=random) for length in lengths]


def part_of_rank(batches: list[Tensor]) -> list[Tensor]:
    rank = dist.get_rank()
    if PLANTED:
        return batches[rank * STEPS : (rank + 1) * STEPS]  # planted: all long ones last
    return batches[rank::2]


def main() -> None:
    device = start()
    batches = part_of_rank(texts())
    order = torch.randperm(STEPS, generator=seeded(2)).tolist()
    model = DistributedDataParallel(TagNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begin = now()
    for number in order:
        words = batches[number].to(device)
        loss = tag_loss(model(words), words % 14)  # planted: thirty times as long on rank 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
