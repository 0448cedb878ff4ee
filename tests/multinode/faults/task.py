"""What the fault matrix trains: a network of a few weights on made-up points, with a fault in
it."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline.config.schema import Config
from drumline.training.tasks.base import Loss, Task
from tests.multinode.faults.inject import Injection, enter_control_group
from tests.multinode.faults.points import Points, make_model

enter_control_group(os.environ)  # before the watch looks at the rank


class Faulty(Task):
    """Trains; in the step of the plan one rank has a fault."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.injection = Injection(os.environ, rank=int(os.environ.get("RANK", "0")))
        self.calls = 0

    def model(self) -> nn.Module:
        return make_model()

    def train_data(self) -> Dataset[Any]:
        return Points(self.injection)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        # The first call is the warm-up's. After a restart steps are not these numbers, but the
        # fault is over then.
        if self.calls:
            self.injection.begin_step(self.calls)
        self.calls += 1
        inputs, targets = batch
        return Loss(functional.cross_entropy(model(inputs), targets, reduction="sum"))
