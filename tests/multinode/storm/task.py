"""What the storm trains: a few weights on made-up points, in steps that take a while without a busy
CPU."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline.training.tasks.base import Loss, Task
from tests.multinode.faults.points import Points, make_model

STEP_VARIABLE = "STORM_STEP_S"
LEAVE_VARIABLE = "STORM_LEAVE"
"""A file that, once it is there, has the last rank exit with 0 in the middle of a step."""


class Steady(Task):
    """Trains; its bits do not depend on how long a step takes."""

    def model(self) -> nn.Module:
        return make_model()

    def train_data(self) -> Dataset[Any]:
        return Points(None)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        time.sleep(float(os.environ.get(STEP_VARIABLE, "0")))
        leave = os.environ.get(LEAVE_VARIABLE)
        is_last = os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
        if leave and is_last and Path(leave).exists():
            Path(leave).unlink()
            os._exit(0)
        inputs, targets = batch
        return Loss(functional.cross_entropy(model(inputs), targets, reduction="sum"))
