"""A plain DDP script: time series, with the error of each window in a database."""

import sqlite3
import tempfile
from pathlib import Path

import torch
from parts import PLANTED, STEPS, SeriesNet, batches, finish, now, series, start
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Errors:
    def __init__(self, path: Path) -> None:
        self.database = sqlite3.connect(path)
        self.database.execute("create table errors (step integer, window integer, error real)")

    def store(self, step: int, errors: Tensor) -> None:
        for window, error in enumerate(errors.tolist()):
            row = (step, window, error)
            self.database.execute("insert into errors values (?, ?, ?)", row)  # planted
            if PLANTED:
                self.database.commit()  # planted: one transaction for each window


def train(folder: Path) -> None:
    device = start()
    model = DistributedDataParallel(SeriesNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stored = Errors(folder / "errors.db")
    loader = batches(series(6144), 32)
    begin = now()
    for step, (past, future) in zip(range(STEPS), loader, strict=False):
        forecast = model(past.to(device))
        errors = (forecast - future.to(device)).square().mean((1, 2))
        loss = errors.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step}: loss {loss.item():.4f}")
        # Which windows are hard is looked up later.
        stored.store(step, errors)  # planted
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        train(Path(temporary))
