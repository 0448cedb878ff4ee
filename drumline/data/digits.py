"""The bundled handwritten digits: 1,797 real images of 8x8 pixels, so that a first run needs no download.

The file and its licence are in `files/`. Every fifth sample is for evaluation (360), the others for training
(1,437).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from drumline.data.dataset import Split
from drumline.data.image_arrays import ImageArrays, Preparation

_FILE = Path(__file__).with_name("files") / "digits.npz"
_MEAN, _STD = 4.88, 6.02  # of the training part; pixels go from 0 to 16


def digits(*, split: Split, augment: bool) -> ImageArrays:
    """One part of the digits, as [count, 1, 8, 8]. Augmentation shifts by up to one pixel: a mirrored digit
    is none."""
    with np.load(_FILE, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    chosen = (np.arange(len(labels)) % 5 == 0) == (split == "eval")
    return ImageArrays(
        images[chosen][:, np.newaxis],
        labels[chosen].astype(np.int64),
        num_classes=10,
        prepare=Preparation(mean=(_MEAN,), std=(_STD,), padding=1 if augment else 0),
    )
