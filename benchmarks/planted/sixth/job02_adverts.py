"""A plain DDP script: adverts, and a table with what is known of each person."""

from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from parts import (
    ADVERTS,
    NUMBERS,
    PEOPLE,
    PLANTED,
    STEPS,
    AdvertNet,
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

COLUMNS = [f"number_{number}" for number in range(NUMBERS)]


def known() -> pd.DataFrame:
    """One row for each person."""
    random = np.random.default_rng(1)
    table = pd.DataFrame(random.normal(size=(PEOPLE, NUMBERS)).astype("float32"), columns=COLUMNS)
    table["person"] = random.permutation(PEOPLE)
    return table


class Views(Dataset[Any]):
    def __init__(self) -> None:
        self.table = known()
        ordered = self.table.sort_values("person")[COLUMNS].to_numpy()
        self.by_person = torch.tensor(ordered)
        self.people = torch.randint(PEOPLE, (16_384,), generator=seeded(1)).tolist()

    def __len__(self) -> int:
        return len(self.people)

    def numbers(self, person: int) -> Tensor:
        row = self.table[self.table["person"] == person]  # planted: looks at all people
        return torch.tensor(row[COLUMNS].to_numpy()[0])  # planted

    def __getitem__(self, index: int) -> tuple[int, int, Tensor, float]:
        person = self.people[index]
        numbers = self.numbers(person) if PLANTED else self.by_person[person]  # planted
        return person, index % ADVERTS, numbers, float(index % 2)


def main() -> None:
    device = start()
    loader = batches(Views(), 64)
    model = DistributedDataParallel(AdvertNet(hidden=768, depth=3).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    begin = now()
    for step, (people, shown, numbers, clicked) in zip(range(STEPS), loader, strict=False):
        scores = model(people.to(device), shown.to(device), numbers.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, clicked.float().to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
