"""A table and a deep network, with a check of every gradient that was meant for one evening."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, TableNet, TableTask
from torch import nn


class Table(TableTask):
    defaults: ClassVar[dict[str, Any]] = {**TableTask.defaults, "train.batch_size": 128}

    def model(self) -> nn.Module:
        torch.autograd.set_detect_anomaly(PLANTED)  # planted: in all steps
        return TableNet(width=64, depth=60)
