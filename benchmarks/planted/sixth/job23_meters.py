"""Days of households, a little shifted in time, without a bottleneck."""

from typing import Any, ClassVar

import torch
from parts import QUARTERS, MeterNet, MeterTask
from torch import nn


class Meters(MeterTask):
    defaults: ClassVar[dict[str, Any]] = {**MeterTask.defaults, "train.batch_size": 192}

    def model(self) -> nn.Module:
        return MeterNet(width=64)

    def on_device(self, batch: Any) -> Any:
        days, households = batch
        if self.training:
            shifts = torch.randint(-4, 5, (len(days), 1, 1), device=days.device)
            places = torch.arange(QUARTERS, device=days.device).view(1, 1, -1)
            days = days.gather(2, (places + shifts) % QUARTERS)
        return days, households
