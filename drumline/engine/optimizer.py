"""The optimizer: which parameters decay, and the fused kernel where the device has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from drumline.config.schema import OptimConfig
from drumline.errors import UsageError


def make_optimizer(model: nn.Module, optim: OptimConfig, *, lr: float) -> Optimizer:
    """SGD or AdamW over the parameters that are trained."""
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
    if optim.name == "adamw":
        return AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=fused)
    return SGD(
        groups, lr=lr, momentum=optim.momentum, nesterov=optim.nesterov and optim.momentum > 0, fused=fused
    )
