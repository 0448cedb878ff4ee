"""The optimizer: which parameters decay, and the fused kernel where the device has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from drumline.config.schema import OptimConfig
from drumline.errors import UsageError

OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW}
"""By what `--optim.name` calls them."""


def make_optimizer(model: nn.Module, optim: OptimConfig, *, lr: float, in_graph: bool = False) -> Optimizer:
    """SGD or AdamW over the parameters that are trained. `in_graph`: one whose step can be captured and replayed: it
    reads its rate, and counts its steps, on the device."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError(f"{type(model).__name__} has no parameter that can be trained")
    # Biases and normalisation scales have one dimension; shrinking them only hurts.
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = all(
        parameter.device.type in ("cuda", "cpu") and torch.is_floating_point(parameter)
        for parameter in trained
    )
    rate = torch.tensor(lr, device=trained[0].device) if in_graph else lr
    if optim.name == "adamw":
        return AdamW(groups, lr=rate, betas=optim.betas, eps=optim.eps, fused=fused, capturable=in_graph)
    return SGD(
        groups, lr=rate, momentum=optim.momentum, nesterov=optim.nesterov and optim.momentum > 0, fused=fused
    )


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """The learning rate of the next step; one that lives on the device is overwritten there, without waiting."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def rate_of(optimizer: Optimizer) -> float:
    """The learning rate as a number. Waits for the device if the rate lives there."""
    return float(optimizer.param_groups[0]["lr"])
