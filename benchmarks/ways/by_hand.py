"""A careful hand-written training loop in plain torch: DDP, autocast, a fused optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.paused_loop import AfterStep
from benchmarks.work import Work


def by_hand(work: Work, after_step: AfterStep) -> None:
    for samples in steps_by_hand(work):
        after_step(samples)


def steps_by_hand(work: Work) -> Iterator[int]:
    """One step after another; how many samples each had."""
    module = work.module()
    optimizer = work.optimizer(module)
    trained: Any = torch.compile(module) if work.is_compiled else module
    model = wrapped(trained, work.device)
    parameters = list(module.parameters())
    autocast = work.autocast()
    while True:
        for inputs, targets in map(work.on_device, work.batches()):
            with autocast:
                loss = model(inputs, targets)
            loss.backward()
            if work.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, work.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield len(inputs)


def wrapped(module: nn.Module, device: torch.device) -> nn.Module:
    """Under DDP if there is a group."""
    if not dist.is_initialized():
        return module
    on = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=on, gradient_as_bucket_view=True)
