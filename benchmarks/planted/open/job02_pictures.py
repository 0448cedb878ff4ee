"""Pictures that are enlarged and reduced again, one by one, before the loss."""

from typing import Any

import torch
from parts import PLANTED, PictureTask
from torch import Tensor
from torch.nn import functional


def resampled(image: Tensor) -> Tensor:
    large = functional.interpolate(image[None], size=224, mode="bicubic")  # planted
    return functional.interpolate(large, size=32, mode="bicubic")[0]  # planted


class Pictures(PictureTask):
    def on_device(self, batch: Any) -> Any:
        images, labels = batch
        if PLANTED:
            images = torch.stack([resampled(image) for image in images])  # planted
        return images, labels
