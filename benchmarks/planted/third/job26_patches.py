"""Noisy patches, with turns of whole batches and a limit of the gradient, without a bottleneck."""

from typing import Any, ClassVar

import torch
from parts import DenoiseTask


class Patches(DenoiseTask):
    defaults: ClassVar[dict[str, Any]] = {
        **DenoiseTask.defaults,
        "train.batch_size": 48,
        "optim.clip_norm": 1.0,
    }

    def on_device(self, batch: Any) -> Any:
        clean = batch[0]
        if self.training and torch.rand(()) < 0.5:
            clean = clean.transpose(2, 3).contiguous()
        return super().on_device([clean])
