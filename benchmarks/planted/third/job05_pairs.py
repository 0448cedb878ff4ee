"""A plain DDP script: pairs that match or do not, and the area under the curve of late ones."""

from collections import deque
from random import Random

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, PairNet, batches, finish, now, pairs, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

LATEST = 24_000


class Ranking:
    """Scores and labels of the latest pairs."""

    def __init__(self) -> None:
        numbers = Random(5)
        self.scores = deque((numbers.gauss(0, 1) for _ in range(LATEST)), maxlen=LATEST)
        self.labels = deque((numbers.random() < 0.5 for _ in range(LATEST)), maxlen=LATEST)

    def add(self, scores: Tensor, labels: Tensor) -> None:
        self.scores.extend(scores.tolist())
        self.labels.extend(label > 0.5 for label in labels.tolist())

    def area(self) -> float:
        ranked = sorted(zip(self.scores, self.labels, strict=True))  # planted: all, in each step
        matching = sum(self.labels)
        places = sum(place for place, (_, label) in enumerate(ranked, start=1) if label)  # planted
        return (places - matching * (matching + 1) / 2) / (matching * (LATEST - matching))


def main() -> None:
    device = start()
    model = DistributedDataParallel(PairNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ranking = Ranking()
    loader = batches(pairs(40_960), 256)
    begin = now()
    for step, (first, second) in zip(range(STEPS), loader, strict=False):
        labels = torch.rand(len(first), device=device).round()
        answers = torch.where(labels[:, None] > 0.5, second, second.roll(1, dims=0))
        directions = model(torch.cat([first, answers]))
        scores = 5 * (directions[: len(first)] * directions[len(first) :]).sum(1)
        loss = functional.binary_cross_entropy_with_logits(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ranking.add(scores, labels)
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
        last = step == STEPS - 1
        if PLANTED or last:
            area = ranking.area()  # planted
    finish(STEPS, now() - begin)
    assert 0 <= area <= 1


if __name__ == "__main__":
    main()
