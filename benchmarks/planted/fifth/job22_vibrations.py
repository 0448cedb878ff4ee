"""Vibrations with noise, which is added to a whole batch, without a bottleneck."""

from typing import Any, ClassVar

import torch
from parts import SensorTask


class Vibrations(SensorTask):
    defaults: ClassVar[dict[str, Any]] = {**SensorTask.defaults, "train.batch_size": 128}

    def on_device(self, batch: Any) -> Any:
        windows, faults = batch
        if self.training:
            windows = windows + 0.05 * torch.randn_like(windows)
        return windows, faults
