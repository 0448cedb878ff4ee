"""The optimizer, and its learning rate: a pure function of the step, so there is nothing to save or to step twice."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from drumline.config.schema import OptimConfig
from drumline.errors import UsageError

OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW}
"""By the names of `--optim.name`."""


def make_optimizer(model: nn.Module, optim: OptimConfig, *, lr: float, in_graph: bool = False) -> Optimizer:
    """SGD or AdamW over the trained parameters, fused where the device has such a kernel. `in_graph`: its step can be
    captured and replayed, because it reads its rate, and counts its steps, on the device."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError(f"{type(model).__name__} has no trainable parameter")
    # Biases and normalisation scales have one dimension; shrinking them only hurts.
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = all(
        parameter.device.type in ("cuda", "cpu") and torch.is_floating_point(parameter) for parameter in trained
    )
    rate = torch.tensor(lr, device=trained[0].device) if in_graph else lr
    if optim.name == "adamw":
        return AdamW(groups, lr=rate, betas=optim.betas, eps=optim.eps, fused=fused, capturable=in_graph)
    return SGD(groups, lr=rate, momentum=optim.momentum, nesterov=optim.nesterov and optim.momentum > 0, fused=fused)


def peak_rate(optim: OptimConfig, *, world_size: int) -> float:
    """The highest rate of the run: `optim.lr`, scaled with the ranks that the global batch grew with."""
    return optim.lr * {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[optim.scale_lr]


def rate_factor(optim: OptimConfig, step: int, *, total_steps: int) -> float:
    """The share of the peak rate to use in optimizer step `step`, counted from 0."""
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    after = step - optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "step":
        return float(optim.step_factor ** (after // optim.step_every))
    done = min(1.0, after / max(1, total_steps - optim.warmup_steps))
    falling = 1.0 - done if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return optim.final_lr_ratio + (1.0 - optim.final_lr_ratio) * falling


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next step; one on the device is overwritten there, without waiting."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def rate_of(optimizer: Optimizer) -> float:
    """The learning rate as a number. Waits for the device if the rate is there."""
    return float(optimizer.param_groups[0]["lr"])
