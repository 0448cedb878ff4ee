"""Healthy jobs that look like hung ones, each for longer than a hasty watchdog waits:
healthy_jobs.py NAME [SECONDS]

`Breakpoint` is a task; the others are scripts, which `launch` runs as they are.
"""

from __future__ import annotations

import os
import pdb  # noqa: T100 - a real breakpoint
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from drumline import DDPManager
from drumline.config.schema import Config
from drumline.training.tasks.base import Loss, Task
from tests.multinode.faults.points import Points, make_model


def own_loader(seconds: float) -> None:
    """Level 1 with torch's own DataLoader: no phase is marked."""
    with DDPManager(device="cpu", threads=1, run="run") as ddp:
        model = ddp.wrap(make_model())
        until = time.monotonic() + seconds
        while True:
            for inputs, targets in DataLoader(Points(None), batch_size=16):
                functional.cross_entropy(model(inputs), targets).backward()
                time.sleep(0.02)
            if ddp.sum(torch.tensor(float(time.monotonic() > until))) > 0:
                return


class Late(Points):
    """One sample of each epoch comes late on rank 1."""

    def __init__(self, seconds: float) -> None:
        super().__init__(None)
        self.seconds = seconds

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == len(self) // 2 and os.environ["RANK"] == "1":
            time.sleep(self.seconds)
        return super().__getitem__(index)


def helper(seconds: float) -> None:
    """A helper process that has ended and was not waited for; then data comes late. Workers end
    with each epoch."""
    with DDPManager(device="cpu", threads=1, run="run") as ddp:
        if os.fork() == 0:
            os._exit(0)
        model = ddp.wrap(make_model())
        for _ in range(3):
            for inputs, targets in DataLoader(Late(seconds), batch_size=16, num_workers=2):
                functional.cross_entropy(model(inputs), targets).backward()


def sleeps(seconds: float) -> None:
    """Level 0: rank 1 waits for something, without the CPU."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    for number in range(40):
        dist.all_reduce(torch.ones(4))
        if number == 20 and dist.get_rank() == 1:
            time.sleep(seconds)
        time.sleep(0.3)
    dist.destroy_process_group()


class Breakpoint(Task):
    """Level 2: rank 1 stands at a breakpoint, then writes a file slowly."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.calls = 0

    def model(self) -> nn.Module:
        return make_model()

    def train_data(self) -> Dataset[Any]:
        return Points(None)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls in (30, 60):
            (_stand_at_breakpoint if self.calls == 30 else _write_slowly)(
                float(os.environ["HEALTHY_S"])
            )
        inputs, targets = batch
        return Loss(functional.cross_entropy(model(inputs), targets, reduction="sum"))


def _stand_at_breakpoint(seconds: float) -> None:
    prompt, hand = os.pipe()
    threading.Timer(seconds, os.write, (hand, b"continue\n")).start()
    with os.fdopen(prompt) as typed, Path(os.devnull).open("w") as screen:
        pdb.Pdb(stdin=typed, stdout=screen, nosigint=True, readrc=False).set_trace()
        torch.ones(1)  # the line that it stands at


def _write_slowly(seconds: float) -> None:
    until = time.monotonic() + seconds
    with Path("slow.txt").open("w") as file:
        while time.monotonic() < until:
            file.write("a line\n")
            file.flush()
            time.sleep(3)


if __name__ == "__main__":
    {"own_loader": own_loader, "helper": helper, "sleeps": sleeps}[sys.argv[1]](float(sys.argv[2]))
