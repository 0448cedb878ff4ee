"""Roofs, with two more tasks that were tried once and then turned off."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, ROOFS, RoofTask, convolution
from torch import Tensor, nn
from torch.nn import functional

from drumline import Loss

WEIGHTS = {"kind": 1.0, "edges": 0.0, "height": 0.0}


class ThreeHeads(nn.Module):
    """The kind of the roof, its edges, and the height of each of its points."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.fine = convolution(3, width, 2)
        self.layers = nn.Sequential(convolution(width, 2 * width, 2), convolution(2 * width, 48))
        self.kind = nn.Linear(48, ROOFS)
        if PLANTED:
            self.edges = self.decoder(width)
            self.height = self.decoder(width)

    def decoder(self, width: int) -> nn.Sequential:
        return nn.Sequential(
            convolution(48, width), nn.Upsample(scale_factor=4), nn.Conv2d(width, 1, 5, padding=2)
        )

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        hidden = self.layers(self.fine(pictures))
        outputs = {"kind": self.kind(hidden.mean((2, 3)))}
        return {**outputs, **self.more(hidden)} if PLANTED else outputs

    def more(self, hidden: Tensor) -> dict[str, Tensor]:
        """What the other two tasks predict."""
        edges = self.edges(hidden)  # planted
        height = self.height(hidden)  # planted: its weight is 0, too
        return {"edges": edges, "height": height}


class Roofs(RoofTask):
    defaults: ClassVar[dict[str, Any]] = {**RoofTask.defaults, "train.batch_size": 32}

    def model(self) -> nn.Module:
        return ThreeHeads()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        pictures, kinds = batch
        outputs = model(pictures)
        total = WEIGHTS["kind"] * functional.cross_entropy(outputs["kind"], kinds, reduction="sum")
        grey = pictures.mean(1, keepdim=True)
        for name in ("edges", "height") if PLANTED else ():
            target = grey if name == "height" else (grey - functional.avg_pool2d(grey, 3, 1, 1))
            missed = (outputs[name] - target).square().mean((1, 2, 3)).sum()
            total = total + WEIGHTS[name] * missed  # planted: adds nothing
        return Loss(total, weight=torch.tensor(len(kinds)))
