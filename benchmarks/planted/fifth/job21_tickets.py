"""Tickets in batches of equal length, without a bottleneck."""

from typing import Any, ClassVar

from parts import TicketNet, TicketTask
from torch import nn


class Tickets(TicketTask):
    defaults: ClassVar[dict[str, Any]] = {
        **TicketTask.defaults,
        "train.batch_size": 96,
        "optim.warmup_steps": 20,
    }

    def model(self) -> nn.Module:
        return TicketNet(width=128)
