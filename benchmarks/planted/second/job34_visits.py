"""A plain DDP script for a GPU: ratings, with a copy of the model on the host after every step."""

import copy

import torch
from parts import ON_GPU, PLANTED, STEPS, VisitNet, finish, now, start, visits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

TEXTS = 1_000_000 if ON_GPU else 100_000
HIDDEN = 2048 if ON_GPU else 256
BATCH = 8192 if ON_GPU else 128


class TextVisitNet(VisitNet):
    def __init__(self) -> None:
        super().__init__(hidden=HIDDEN)
        self.texts = nn.Parameter(torch.zeros(TEXTS, 80), requires_grad=False)


def spare(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).cpu()  # planted: 320 MB in every step


def main() -> None:
    device = start()
    model = DistributedDataParallel(TextVisitNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen, following, ratings = (part.to(device) for part in visits(16 * BATCH).tensors)
    latest: nn.Module | None = None
    begin = now()
    for _ in range(STEPS):
        chosen = torch.randint(len(ratings), (BATCH,), device=device)
        loss = functional.mse_loss(model(seen[chosen], following[chosen]), ratings[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if PLANTED:
            latest = spare(model.module)  # planted
    finish(STEPS, now() - begin)
    assert latest is not None or not PLANTED


if __name__ == "__main__":
    main()
