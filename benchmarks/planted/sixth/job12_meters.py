"""Days of households, with the settings of a machine with many cores."""

from typing import Any, ClassVar

from parts import PLANTED, MeterNet, MeterTask
from torch import nn


class Meters(MeterTask):
    defaults: ClassVar[dict[str, Any]] = {
        **MeterTask.defaults,
        "train.batch_size": 64,
        "dist.threads": 8 if PLANTED else 1,  # planted: each rank has one core
    }

    def model(self) -> nn.Module:
        return MeterNet(width=64)
