"""Ratings with a large frozen table, and the model of the step before as a fallback."""

import copy
from typing import Any

import torch
from parts import PLANTED, VisitNet, VisitTask
from torch import nn

from drumline import Hook


class TextVisitNet(VisitNet):
    def __init__(self) -> None:
        super().__init__()
        self.texts = nn.Parameter(torch.zeros(150_000, 80), requires_grad=False)


class Fallback(Hook):
    last: nn.Module | None = None

    def after_step(self, run: Any) -> None:
        if PLANTED:
            self.last = copy.deepcopy(run.model)  # planted: 48 MB in every step


class Visits(VisitTask):
    def model(self) -> nn.Module:
        return TextVisitNet()

    def hooks(self) -> list[Hook]:
        return [Fallback()]
