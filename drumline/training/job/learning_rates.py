"""The learning rates of a run: a pure function of the step, so they have no state to save."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import assert_never

from torch import Tensor
from torch.optim import Optimizer

from drumline.base.errors import UsageError
from drumline.config.schema import OptimConfig


class LearningRates:
    """Sets the rates of a step: each parameter group's own, times a factor that depends only on the
    step."""

    def __init__(
        self, optimizer: Optimizer, optim: OptimConfig, schedule: Callable[[int, int], float | None]
    ) -> None:
        """`schedule(step, total_steps)`: the task's own factor; if it is None, the settings
        decide."""
        self._optimizer = optimizer
        self._optim = optim
        self._schedule = schedule
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self.peak = max(self._peaks)
        """The highest rate of a group."""
        self.num_rates = len(set(self._peaks))
        """How many different peaks the groups have."""
        self._highest_group = self._peaks.index(self.peak)

    def highest(self) -> float:
        """The rate of the latest step, of the group whose peak is the highest. Waits for a rate on
        the device."""
        return float(self._optimizer.param_groups[self._highest_group]["lr"])

    def set(self, step: int, total_steps: int) -> None:
        """Before optimizer step `step`, counted from 0. A rate on the device is overwritten there,
        without waiting."""
        factor = self.factor(step, total_steps)
        # Looked up each time: loading a state replaces the groups.
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = peak * factor

    def factor(self, step: int, total_steps: int) -> float:
        factor = self._schedule(step, total_steps)
        if factor is None:
            return rate_factor(self._optim, step, total_steps=total_steps)
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise UsageError(
                f"schedule({step}, {total_steps}) returned {factor!r}, not a factor of 0 or more",
                next_step="return a number that every group's lr is multiplied by, or None for --optim.schedule",
            )
        return float(factor)


def peak_rate(optim: OptimConfig, *, world_size: int) -> float:
    """The highest rate of the run: `optim.lr`, scaled by the number of ranks if the global batch
    was."""
    match optim.scale_lr:
        case "none":
            return optim.lr
        case "linear":
            return optim.lr * world_size
        case "sqrt":
            return optim.lr * math.sqrt(world_size)
        case _:
            assert_never(optim.scale_lr)


def rate_factor(optim: OptimConfig, step: int, *, total_steps: int) -> float:
    """The fraction of the peak rate in optimizer step `step`, counted from 0."""
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    after = step - optim.warmup_steps
    done = min(1.0, after / max(1, total_steps - optim.warmup_steps))
    match optim.schedule:
        case "constant":
            return 1.0
        case "step":
            return float(optim.step_factor ** (after // optim.step_every))
        case "linear":
            falling = 1.0 - done
        case "cosine":
            falling = 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            assert_never(optim.schedule)
    return optim.final_lr_ratio + (1.0 - optim.final_lr_ratio) * falling
