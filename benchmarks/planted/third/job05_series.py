"""Time series, with messages for debugging that nobody reads."""

import logging
from typing import Any

import torch
from parts import PLANTED, SeriesTask
from torch import Tensor, nn
from torch.nn import functional

from drumline import Loss

LOG = logging.getLogger("series")
LOG.setLevel(logging.WARNING)
torch.set_printoptions(profile="full")


def explain(forecast: Tensor, future: Tensor) -> None:
    LOG.debug(f"forecast {forecast}")  # planted: the text is made, and thrown away
    LOG.debug(f"future {future}")  # planted


class Series(SeriesTask):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        past, future = batch
        forecast = model(past)
        total = functional.mse_loss(forecast, future, reduction="sum")
        weight = future.numel()
        mean_error = (forecast - future).abs().sum().detach()
        if PLANTED:
            explain(forecast, future)  # planted
        return Loss(total, weight=weight, metrics={"absolute": mean_error})
