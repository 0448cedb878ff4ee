"""Photos of leaves, mirrored a batch at a time, without a bottleneck."""

from typing import Any, ClassVar

import torch
from parts import LeafTask


class Leaves(LeafTask):
    defaults: ClassVar[dict[str, Any]] = {**LeafTask.defaults, "train.batch_size": 96}

    def on_device(self, batch: Any) -> Any:
        photos, species = batch
        if self.training:
            mirrored = torch.rand(len(photos), 1, 1, 1, device=photos.device) < 0.5
            photos = torch.where(mirrored, photos.flip(3), photos)
        return photos, species
