"""Lines of text with a large frozen table, saved after every second step."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, LineNet, LineTask
from torch import nn


class TableNet(LineNet):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8_000_000), requires_grad=False)


class Lines(LineTask):
    defaults: ClassVar[dict[str, Any]] = {
        **LineTask.defaults,
        "checkpoint.every_steps": 2 if PLANTED else 0,  # planted
    }

    def model(self) -> nn.Module:
        return TableNet()
