"""Photos of leaves that are mixed with changed versions in the step, one after another."""

import math
from typing import Any, ClassVar

import torch
from parts import PLANTED, LeafNet, LeafTask
from torch import Tensor, nn
from torch.nn import functional

VERSIONS = 3
GREY = torch.tensor([0.3, 0.6, 0.1])


def turned(photos: Tensor, angles: Tensor) -> Tensor:
    cosines, sines = angles.cos(), angles.sin()
    zeros = torch.zeros_like(angles)
    rows = [torch.stack([cosines, -sines, zeros], 1), torch.stack([sines, cosines, zeros], 1)]
    places = functional.affine_grid(torch.stack(rows, 1), list(photos.shape), align_corners=False)
    return functional.grid_sample(photos, places, align_corners=False)


def coloured(photos: Tensor, strengths: Tensor) -> Tensor:
    """Less or more colour, contrast and light."""
    colour, contrast, light = strengths.view(-1, 3, 1, 1, 1).unbind(1)
    grey = (photos * GREY.to(photos.device).view(3, 1, 1)).sum(1, keepdim=True)
    photos = grey + colour * (photos - grey)
    middle = photos.mean((1, 2, 3), keepdim=True)
    photos = middle + contrast * (photos - middle)
    return (photos * light).clamp(0, 1)


def changed(photos: Tensor) -> Tensor:
    angles = math.pi * torch.rand(len(photos), device=photos.device)
    strengths = 0.8 + 0.4 * torch.rand(len(photos), 3, device=photos.device)
    return coloured(turned(photos, angles), strengths)


def mixed(photos: Tensor) -> Tensor:
    """Each photo with three changed versions of it."""
    total = photos
    for _ in range(VERSIONS):
        total = total + changed(photos)
    return total / (VERSIONS + 1)


class Leaves(LeafTask):
    defaults: ClassVar[dict[str, Any]] = {**LeafTask.defaults, "train.batch_size": 96}

    def model(self) -> nn.Module:
        return LeafNet(width=12)

    def on_device(self, batch: Any) -> Any:
        photos, species = batch
        if not self.training:
            return photos, species
        if PLANTED:
            return torch.cat([mixed(photo[None]) for photo in photos]), species  # planted
        return mixed(photos), species
