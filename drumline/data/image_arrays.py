"""Images held in memory as bytes, and how bytes become the normalised tensors a model sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.data.augment import shift_and_flip
from drumline.data.draws import Draws


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What happens to a batch of images on the way to the model."""

    mean: tuple[float, ...]
    """Of each channel, in bytes."""
    std: tuple[float, ...]
    padding: int = 0
    """Augmentation: shift by up to so many pixels; 0 for none."""
    flip: bool = False
    """Augmentation: mirror left and right by chance."""

    def __call__(self, images: NDArray[np.uint8], draws: Draws | None) -> Tensor:
        """Normalised float32 images; augmented if there are draws to decide how."""
        if draws is not None and self.padding:
            images = shift_and_flip(images, draws, padding=self.padding, flip=self.flip)
        normalised = images.astype(np.float32)
        normalised -= np.array(self.mean, dtype=np.float32)[:, np.newaxis, np.newaxis]
        normalised /= np.array(self.std, dtype=np.float32)[:, np.newaxis, np.newaxis]
        return torch.from_numpy(normalised)


class ImageArrays:
    """Labelled images: uint8 [count, channels, height, width] and int64 [count]."""

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        *,
        num_classes: int,
        prepare: Preparation,
    ) -> None:
        self.num_classes = num_classes
        self.in_channels = images.shape[1]
        self._images = images
        self._labels = labels
        self._prepare = prepare

    def __len__(self) -> int:
        return len(self._images)

    def batch(self, indices: NDArray[np.int64], draws: Draws | None) -> tuple[Tensor, Tensor]:
        return self._prepare(self._images[indices], draws), torch.from_numpy(self._labels[indices])
