"""Images held in memory as bytes, and how bytes become the normalised tensors a model sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from drumline.data.augment import Shape, corners, cut, normalise
from drumline.data.dataset import TwoPartDataset
from drumline.data.draws import Draws
from drumline.data.rows import rows_of


class LabelledImages(NamedTuple):
    """A batch as it leaves the host: uint8 [count, channels, height, width] and int64 [count]."""

    images: Tensor
    labels: Tensor


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

    def choose(self, draws: Draws | None, shape: Shape) -> Tensor | None:
        """Where images of this shape are cut; None: they stay as they are."""
        if draws is None or not self.padding:
            return None
        return corners(draws, shape, padding=self.padding, flip=self.flip)

    def finish(self, rows: LabelledImages, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalised float32 images, augmented if there are places to cut them at; and their labels."""
        images = rows.images
        if places is not None:
            images = cut(images, places, padding=self.padding, flip=self.flip)
        return normalise(images, self.mean, self.std), rows.labels


class ImageArrays(TwoPartDataset):
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

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> LabelledImages:
        return LabelledImages(
            rows_of(self._images, indices, pinned=pinned), rows_of(self._labels, indices, pinned=pinned)
        )

    def choose(self, draws: Draws | None) -> Tensor | None:
        _, channels, height, width = self._images.shape
        return self._prepare.choose(draws, (channels, height, width))

    def finish(self, rows: LabelledImages, choices: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._prepare.finish(rows, choices)
