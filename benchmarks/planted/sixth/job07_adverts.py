"""Adverts, with settings from a larger network."""

from typing import Any, ClassVar

from parts import PLANTED, AdvertNet, AdvertTask
from torch import nn


class Adverts(AdvertTask):
    defaults: ClassVar[dict[str, Any]] = {
        **AdvertTask.defaults,
        "train.batch_size": 256,
        "train.accumulate": 32 if PLANTED else 1,  # planted: four samples at a time
    }

    def model(self) -> nn.Module:
        return AdvertNet(hidden=256, depth=2)
