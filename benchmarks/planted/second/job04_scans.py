"""Scans, with masks that are smoothed by the distance of pixels."""

from typing import Any

import torch
from parts import PLANTED, ScanTask
from torch import Tensor, nn
from torch.nn import functional

from drumline import Loss


def blur_matrix(size: int, device: torch.device) -> Tensor:
    places = torch.arange(float(size), device=device)
    pixels = torch.cartesian_prod(places, places)
    weights = torch.exp(-torch.cdist(pixels, pixels).square() / 2)  # planted: the same each time
    return weights / weights.sum(1, keepdim=True)


class Scans(ScanTask):
    _blur: Tensor | None = None

    def blur(self, masks: Tensor) -> Tensor:
        if PLANTED or self._blur is None:
            self._blur = blur_matrix(masks.shape[-1], masks.device)  # planted
        return (masks.flatten(1) @ self._blur).view_as(masks)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        images, masks = batch
        scores = model(images)
        smooth = self.blur(masks).clamp(0, 1)
        total = functional.binary_cross_entropy_with_logits(scores, smooth, reduction="sum")
        return Loss(total, weight=masks.numel())
