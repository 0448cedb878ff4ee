"""Images in a folder for each class. Workers decode and crop; the device does what is done to whole batches.

drumline train examples/image_folder.py:Images --data.dir images --data.workers 2
"""

import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from drumline import Loss, Task

SIZE, MARGIN = 16, 2


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """FOLDER/CLASS/*, as bytes: a quarter of what floats would take on their way to the device."""

    def __init__(self, folder: Path, *, augment: bool) -> None:
        self.classes = sorted(one.name for one in folder.iterdir() if one.is_dir())
        self.augment = augment
        self.samples = [
            (path, label) for label, name in enumerate(self.classes) for path in sorted((folder / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            larger = image.convert("RGB").resize((SIZE + MARGIN, SIZE + MARGIN))
        # Drumline seeds `random` by (seed, epoch, index): the same crop on any rank, in any worker, after a resume.
        left, top = (random.randint(0, MARGIN) if self.augment else MARGIN // 2 for _ in range(2))  # noqa: S311
        pixels = np.array(larger.crop((left, top, left + SIZE, top + SIZE)))
        return torch.from_numpy(pixels).permute(2, 0, 1), label


class Images(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "data.dir": "images",  # with train/CLASS/* and eval/CLASS/*
        "train.epochs": 5,
        "train.batch_size": 64,
        "optim.lr": 0.05,
    }
    best_metric, higher_is_better = "accuracy", True

    def model(self) -> nn.Module:
        def layer(inputs: int, outputs: int) -> nn.Module:
            convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

        classes = len(self.train_data().classes)
        return nn.Sequential(layer(3, 16), layer(16, 32), layer(32, 64), nn.Flatten(), nn.Linear(256, classes))

    def train_data(self) -> ImageFiles:
        return ImageFiles(Path(self.config.data.dir, "train"), augment=True)

    def eval_data(self) -> ImageFiles:
        return ImageFiles(Path(self.config.data.dir, "eval"), augment=False)

    def on_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return images.float() / 127.5 - 1, labels

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        images, labels = batch
        scores = model(images)
        correct = (scores.argmax(1) == labels).sum()
        return Loss(cross_entropy(scores, labels, reduction="sum"), metrics={"accuracy": correct})
