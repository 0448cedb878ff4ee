"""Random shift and mirror of a batch of images, decided by (seed, epoch, sample index)."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from drumline.data.draws import Draws

_STREAM = 0xA06  # the stream of draws that augmentation uses


def shift_and_flip(images: NDArray[np.uint8], draws: Draws, *, padding: int, flip: bool) -> NDArray[np.uint8]:
    """Each image [channels, height, width] cut at random from itself with a black border, and mirrored by
    chance."""
    count, channels, height, width = images.shape
    chances = draws.uniform(3, stream=_STREAM)
    down, right = (chances[:, :2] * (2 * padding + 1)).astype(np.int64).T
    bordered = np.zeros((count, channels, height + 2 * padding, width + 2 * padding), dtype=np.uint8)
    bordered[:, :, padding : padding + height, padding : padding + width] = images
    # A view of every possible cut; indexing it copies one cut of each image.
    cuts = sliding_window_view(bordered, (height, width), axis=(2, 3))
    shifted: NDArray[np.uint8] = cuts[np.arange(count), :, down, right]
    if flip:
        mirrored = chances[:, 2] < 0.5
        shifted[mirrored] = shifted[mirrored, :, :, ::-1]
    return shifted
