"""Large pictures in memory and a small network, with twelve loading processes on each rank."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, PictureTask
from torch import Tensor, nn
from torch.utils.data import Dataset


class LargePictures(Dataset[Any]):
    def __init__(self) -> None:
        self.images = torch.randn(96, 3, 256, 256, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index % len(self.images)], index % 10


class Pictures(PictureTask):
    defaults: ClassVar[dict[str, Any]] = {
        **PictureTask.defaults,
        "train.batch_size": 64,
        "data.workers": 12 if PLANTED else 0,  # planted
    }

    def model(self) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(3 * 16 * 16, 10))

    def train_data(self) -> Dataset[Any]:
        return LargePictures()
