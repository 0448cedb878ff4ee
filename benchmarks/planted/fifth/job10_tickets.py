"""Tickets, with a hook that keeps everything for the case that the run fails."""

import gzip
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from parts import PLANTED, TicketNet, TicketTask
from torch import nn

from drumline import Hook


class Rescue(Hook):
    """The latest state of each rank, in a file of its own."""

    every_steps = 4 if PLANTED else 1000  # planted

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()

    def after_step(self, run: Any) -> None:
        state = {"weights": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        self.write(Path(self.folder.name) / f"rank-{run.rank}.pt", state)

    def write(self, path: Path, state: dict[str, Any]) -> None:
        with path.with_suffix(".new").open("wb") as file:
            with gzip.open(file, "wb", compresslevel=3) as packed:
                torch.save(state, packed)  # planted: 10 MB
            file.flush()
            os.fsync(file.fileno())  # planted: until the disk has them
        path.with_suffix(".new").replace(path)


class Tickets(TicketTask):
    defaults: ClassVar[dict[str, Any]] = {**TicketTask.defaults, "train.batch_size": 32}

    def model(self) -> nn.Module:
        return TicketNet(width=96, tokens=6000)

    def hooks(self) -> list[Hook]:
        return [Rescue()]
