"""The learning rate as a pure function of the optimizer step: nothing to save, and nothing to step twice."""

from __future__ import annotations

import math


def rate_factor(
    step: int,
    *,
    total_steps: int,
    schedule: str,
    warmup_steps: int = 0,
    final_ratio: float = 0.0,
    step_every: int = 1000,
    step_factor: float = 0.1,
) -> float:
    """The share of the peak rate to use in optimizer step `step`, counted from 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    after = step - warmup_steps
    if schedule == "constant":
        return 1.0
    if schedule == "step":
        return float(step_factor ** (after // step_every))
    progress = min(1.0, after / max(1, total_steps - warmup_steps))
    falling = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return final_ratio + (1.0 - final_ratio) * falling


def scaled_rate(lr: float, *, rule: str, world_size: int) -> float:
    """The peak rate when the global batch has grown with the world."""
    return lr * {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[rule]
