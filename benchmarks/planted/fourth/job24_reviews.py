"""A plain DDP script: reviews in batches of almost equal lengths, without a bottleneck."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from parts import STEPS, WORDS, ReviewNet, finish, now, seeded, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

BATCH = 32


class SimilarLengths(Sampler[list[int]]):
    """Neighbours in the order of lengths, one batch for each rank, in a random order."""

    def __init__(self, lengths: list[int]) -> None:
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.size = BATCH * dist.get_world_size()

    def __iter__(self) -> Iterator[list[int]]:
        parts = len(self.order) // self.size
        for part in torch.randperm(parts, generator=seeded(3)).tolist():
            chosen = self.order[part * self.size : (part + 1) * self.size]
            yield chosen[dist.get_rank() :: dist.get_world_size()]


def filled(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def main() -> None:
    device = start()
    random = seeded(1)
    lengths = torch.randint(40, 97, (8192,), generator=random).tolist()
    texts = [torch.randint(1, WORDS, (length,), generator=random) for length in lengths]
    loader = DataLoader(texts, batch_sampler=SimilarLengths(lengths), collate_fn=filled)
    model = DistributedDataParallel(ReviewNet().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin = now()
    for step, words in zip(range(STEPS), loader, strict=False):
        words = words.to(device)
        loss = functional.cross_entropy(model(words), words[:, 0] % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
