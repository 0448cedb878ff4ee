"""One optimizer step: the hot path. Nothing here waits for the device, and nothing is per sample.

A task's loss is a sum over its micro-batch. Gradients are wanted of the mean over the whole global batch, over all
micro-batches and ranks. DDP averages over ranks, so each sum is scaled by world_size / (samples in the global batch)
before its backward pass; the plan knows that number on every rank, so it costs no communication. A loss with weights
of its own (tokens) needs the sum of weights over all ranks: it travels while the last backward pass runs, and the
gradients are corrected by one multiplication after.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drumline.data.loader import Micro, Step
from drumline.metrics.meters import Meter
from drumline.tasks.base import Loss

LossFunction = Callable[[nn.Module, Any], Loss]


class TrainStep:
    """Runs steps on one model and optimizer; holds what would otherwise be made anew in every step."""

    def __init__(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        optimizer: Optimizer,
        *,
        meter: Meter,
        autocast: AbstractContextManager[object],
        scaler: GradScaler | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self._model = model
        self._loss_function = loss_function
        self._optimizer = optimizer
        self._meter = meter
        self._autocast = autocast
        self._scaler = scaler
        self._clip_norm = clip_norm
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._world_size = dist.get_world_size() if isinstance(model, DistributedDataParallel) else 1
        self._no_sync = model.no_sync if isinstance(model, DistributedDataParallel) else nullcontext
        self.grad_norm: Tensor | None = None

    def __call__(self, step: Step) -> None:
        """Collective: forward and backward of every micro-batch, one synchronisation, one update."""
        scale = self._world_size / step.plan.global_size
        weight: Tensor | None = None
        for micro in step.micro_batches:
            with nullcontext() if micro.is_last else self._no_sync():
                loss = self._forward(micro)
                if loss.weight is not None:
                    weight = self._add_weight(weight, loss.weight, micro)
                reduction = self._send_weight(weight) if micro.is_last else None
                self._backward(loss, scale if micro.size else 0.0)
            if micro.size:
                self._meter.add(
                    loss.total.detach(), micro.size if loss.weight is None else loss.weight, loss.metrics
                )
        if reduction is not None:
            reduction.wait()
        correction = None if weight is None else step.plan.global_size / torch.where(weight > 0, weight, 1.0)
        self._update(correction)

    def _forward(self, micro: Micro) -> Loss:
        with self._autocast:
            return self._loss_function(self._model, micro.data)

    def _backward(self, loss: Loss, scale: float) -> None:
        total = loss.total * scale
        (total if self._scaler is None else self._scaler.scale(total)).backward()

    def _add_weight(self, so_far: Tensor | None, weight: Tensor | float, micro: Micro) -> Tensor:
        counted = torch.as_tensor(weight, dtype=torch.float32, device=self._parameters[0].device).detach()
        counted = counted if micro.size else torch.zeros_like(counted)
        return counted.clone() if so_far is None else so_far + counted

    def _send_weight(self, weight: Tensor | None) -> dist.Work | None:
        if weight is None or self._world_size == 1:
            return None
        return dist.all_reduce(weight, async_op=True)

    def _update(self, correction: Tensor | None) -> None:
        if self._scaler is not None and (self._clip_norm is not None or correction is not None):
            self._scaler.unscale_(self._optimizer)
        if correction is not None:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], correction)
        if self._clip_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
