"""Roofs on photos from a plane, kept as they came from the camera."""

import io
from typing import Any, ClassVar

import numpy as np
import torch
from parts import PLANTED, ROOF_SIZE, ROOFS, RoofTask
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

CAMERA = (1024, 768)


def photo(seed: int) -> bytes:
    """A JPEG as large as the camera makes it."""
    colours = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    packed = io.BytesIO()
    Image.fromarray(colours).resize(CAMERA).save(packed, "JPEG", quality=90)
    return packed.getvalue()


def small(packed: bytes) -> Tensor:
    """A photo as the network takes it."""
    picture = Image.open(io.BytesIO(packed)).convert("RGB")  # planted: all pixels of the camera
    picture = picture.resize((ROOF_SIZE, ROOF_SIZE), Image.Resampling.BICUBIC)  # planted
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


class Photos(Dataset[Any]):
    def __init__(self) -> None:
        self.packed = [photo(seed) for seed in range(96)]
        self.small = [] if PLANTED else [small(packed) for packed in self.packed]

    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = index % len(self.packed)
        if PLANTED:
            return small(self.packed[number]), number % ROOFS  # planted
        return self.small[number], number % ROOFS


class Roofs(RoofTask):
    defaults: ClassVar[dict[str, Any]] = {**RoofTask.defaults, "train.batch_size": 12}

    def train_data(self) -> Dataset[Any]:
        return Photos()
