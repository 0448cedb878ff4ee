"""A plain DDP script: power of households, measured in every second of a day."""

import torch
import torch.distributed as dist
from parts import (
    HOUSEHOLDS,
    PLANTED,
    QUARTERS,
    STEPS,
    MeterNet,
    batches,
    finish,
    now,
    seeded,
    start,
)
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

SECONDS = 86_400


def quarters(day: Tensor) -> Tensor:
    """The mean of each quarter of an hour, without the peaks of single seconds."""
    seconds = day.float() / 1000
    calm = seconds.unfold(0, 5, 1).median(1).values  # planted: the same days in every epoch
    calm = functional.pad(calm, (2, 2))
    return calm.view(1, QUARTERS, -1).mean(2)


class Days(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self.days = torch.randint(0, 4000, (96, SECONDS), dtype=torch.int16, generator=seeded(1))
        self.ready = [] if PLANTED else [quarters(day) for day in self.days]

    def __len__(self) -> int:
        return 24 * len(self.days)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = index % len(self.days)
        if PLANTED:
            return quarters(self.days[number]), number % HOUSEHOLDS  # planted
        return self.ready[number], number % HOUSEHOLDS


def main() -> None:
    device = start()
    loader = batches(Days(), 8)
    model = DistributedDataParallel(MeterNet(width=128).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    begin = now()
    for step, (days, households) in zip(range(STEPS), loader, strict=False):
        loss = functional.cross_entropy(model(days.to(device)), households.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
