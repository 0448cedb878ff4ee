"""A healthy run that takes its time here and there: nothing in it is a hang, and only the data
stall is a stall."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline.checkpoint import store
from drumline.config.schema import Config
from drumline.training.tasks.base import Loss, Task
from tests.multinode.faults.points import Points, make_model

VARIABLE = "CALM_FOLDER"
# What happens in which share of the run's steps, on which ranks (None: on all), for how many
# seconds.
PAUSES: dict[str, tuple[float, int | None, float]] = {
    "compile": (0.1, None, 15.0),
    "busy": (0.3, 2, 10.0),
    "save": (0.45, 0, 12.0),
    "data": (0.6, 1, 20.0),
    "evaluation": (0.0, 3, 15.0),
}


class Pauses:
    """Which of them this rank is due to take; each is taken once, and noted when it is over."""

    def __init__(self, config: Config) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.total = config.train.steps or 0
        self.step = 0
        self.left = {name for name, (_, rank, _) in PAUSES.items() if rank in (None, self.rank)}

    def take(self, name: str, pass_time: Callable[[float], None]) -> None:
        share, _, seconds = PAUSES[name]
        if name not in self.left or self.step < share * self.total:
            return
        self.left.remove(name)
        began = time.time()
        pass_time(seconds)
        note = {"what": name, "rank": self.rank, "began": began, "ended": time.time()}
        with (Path(os.environ[VARIABLE]) / "pauses.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10_000))


class SlowPoints(Points):
    """Data that does not come for a while."""

    def __init__(self, pauses: Pauses) -> None:
        super().__init__(None)
        self.pauses = pauses

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.pauses.take("data", time.sleep)
        return super().__getitem__(index)


class Calm(Task):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pauses = Pauses(config)
        write_file = store.write_file

        def slowly(*args: Any, **options: Any) -> Any:
            self.pauses.take("save", time.sleep)
            return write_file(*args, **options)

        store.write_file = slowly

    def model(self) -> nn.Module:
        return make_model()

    def train_data(self) -> Dataset[Any]:
        return SlowPoints(self.pauses)

    def eval_data(self) -> Dataset[Any]:
        return Points(None)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if model.training:
            self.pauses.step += 1
            self.pauses.take("compile", compute)
            self.pauses.take("busy", compute)
        else:
            self.pauses.take("evaluation", compute)
        inputs, targets = batch
        return Loss(functional.cross_entropy(model(inputs), targets, reduction="sum"))
