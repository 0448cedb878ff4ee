"""Lines of text, with a first rank that asks for the vocabulary in one step of four."""

import time
from typing import Any, ClassVar

import torch.distributed as dist
from parts import PLANTED, LineTask
from torch import nn

from drumline import Loss


class Lines(LineTask):
    defaults: ClassVar[dict[str, Any]] = {**LineTask.defaults, "train.batch_size": 8}
    calls = 0

    def refresh_vocabulary(self) -> None:
        self.calls += 1
        if PLANTED and dist.get_rank() == 0 and self.calls % 4 == 0:
            time.sleep(0.3)  # planted: one rank, one step of four

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.refresh_vocabulary()
        return super().loss(model, batch)
