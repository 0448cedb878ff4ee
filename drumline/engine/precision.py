"""The arithmetic of a step: autocast to a smaller type, and loss scaling where that type needs it (fp16)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.amp.grad_scaler import GradScaler

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context for forward passes, made once and entered in every step. fp32 needs none."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def make_scaler(precision: str, device: torch.device) -> GradScaler | None:
    """fp16 gradients underflow without a scale; bf16 has the range of fp32 and needs none."""
    return GradScaler(device.type) if precision == "fp16" else None
