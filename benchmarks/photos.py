"""A dataset of one's own, twice: prepared one sample at a time in workers, as people write it, and
as bytes that are prepared for the whole batch on the device. Both have the same batches for the
same random numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

MEAN = 118.0
STD = 58.0
CLASSES = 1000


class Photos(Dataset[tuple[Tensor, ...]]):
    """Random images in memory, cropped, mirrored and normalised. A few images are used again and
    again."""

    def __init__(self, length: int, *, size: int, crop: int, num_images: int = 1024) -> None:
        self.images = torch.randint(0, 256, (num_images, 3, size, size), dtype=torch.uint8)
        self.length = length
        self.crop = crop

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image = self.images[index % len(self.images)]
        chances = torch.rand(3)
        top, left = (chances[:2] * (image.shape[-1] - self.crop + 1)).long().tolist()
        image = image[:, top : top + self.crop, left : left + self.crop]
        if chances[2] < 0.5:
            image = image.flip(2)
        return (image.float() - MEAN) / STD, torch.tensor(index % CLASSES)


class PhotoBytes(Photos):
    """The images as they are, with the random numbers for `prepared`."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.images[index % len(self.images)], torch.rand(3), torch.tensor(index % CLASSES)


def prepared(images: Tensor, chances: Tensor, crop: int) -> Tensor:
    """What `Photos` does to a sample, for a batch. The result is in channels_last."""
    places = torch.arange(crop, device=images.device)
    top, left = (chances[:, :2] * (images.shape[-1] - crop + 1)).long().unsqueeze(2).unbind(1)
    rows = top + places
    columns = left + torch.where(chances[:, 2:] < 0.5, places.flip(0), places)
    each = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    pixels = images.permute(0, 2, 3, 1)[each, rows.unsqueeze(2), columns.unsqueeze(1)]
    return pixels.permute(0, 3, 1, 2).float().sub_(MEAN).div_(STD)
