"""The arithmetic of a step: autocast to a smaller type, loss scaling where that type needs it (fp16), TF32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.amp.grad_scaler import GradScaler

from drumline.config.schema import TrainConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context for forward passes, made once and entered in every step. fp32 needs none."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def make_scaler(precision: str, device: torch.device) -> GradScaler | None:
    """fp16 gradients underflow without a scale; bf16 has the range of fp32 and needs none."""
    return GradScaler(device.type) if precision == "fp16" else None


def set_arithmetic(train: TrainConfig, device: torch.device) -> None:
    """What torch lets its CUDA libraries do, for the whole process."""
    if device.type != "cuda":
        return
    if train.tf32 != "auto":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = train.tf32 == "on"
    torch.backends.cudnn.benchmark = train.cudnn_benchmark
