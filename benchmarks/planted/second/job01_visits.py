"""A plain DDP script: ratings, with one file for each visitor."""

import csv
import tempfile
from pathlib import Path
from typing import Any

import torch
from parts import HISTORY, PLANTED, STEPS, VisitNet, batches, finish, now, start, visits
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

FILES = 400
BATCH = 128


class VisitorFiles(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen, self.following, self.ratings = visits(FILES).tensors
        for number, items in enumerate(self.seen.tolist()):
            with (folder / f"{number}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([item, "seen", number, "web"] for item in items * 6)

    def __len__(self) -> int:
        return STEPS * BATCH * 2

    def seen_by(self, number: int) -> Tensor:
        with (self.folder / f"{number}.csv").open(newline="") as file:  # planted: one for a sample
            items = [int(item) for item, *_ in csv.reader(file)]
        return torch.tensor(items[:HISTORY])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        number = index % FILES
        seen = self.seen_by(number) if PLANTED else self.seen[number]  # planted
        return seen, self.following[number], self.ratings[number]


def train(folder: Path) -> None:
    device = start()
    model = DistributedDataParallel(VisitNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = now()
    for seen, following, ratings in batches(VisitorFiles(folder), BATCH):
        predicted = model(seen.to(device), following.to(device))
        loss = functional.mse_loss(predicted, ratings.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        train(Path(temporary))
