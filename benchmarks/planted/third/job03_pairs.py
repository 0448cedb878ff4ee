"""A plain DDP script: contrastive pairs in two languages, with negatives for each anchor."""

import torch
import torch.distributed as dist
from parts import FEATURES, PLANTED, STEPS, PairNet, finish, now, seeded, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

ANCHORS = 64
NEGATIVES = {"de": 14, "is": 3}


def negatives() -> int:
    language = sorted(NEGATIVES)[dist.get_rank() % 2]
    return NEGATIVES[language] if PLANTED else 3  # planted: each rank has one language


def drawn(step: int) -> tuple[Tensor, Tensor]:
    """Anchors, and for each the right answer and then the wrong ones."""
    random = seeded(1000 * step + dist.get_rank())
    anchors = torch.randn(ANCHORS, FEATURES, generator=random)
    count = 1 + negatives()  # planted: fifteen for de, four for is
    answers = torch.randn(ANCHORS, count, FEATURES, generator=random)
    answers[:, 0] += anchors
    return anchors, answers


def contrast(model: nn.Module, anchors: Tensor, answers: Tensor) -> Tensor:
    views = torch.cat([anchors[:, None], answers], dim=1)
    directions = model(views)  # planted: 1,024 views on rank 0, 320 on rank 1
    scores = (directions[:, :1] * directions[:, 1:]).sum(2) / 0.1
    return functional.cross_entropy(scores, torch.zeros(ANCHORS, dtype=torch.long))


def main() -> None:
    device = start()
    model = DistributedDataParallel(PairNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    begin = now()
    for step in range(STEPS):
        loss = contrast(model, *drawn(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
