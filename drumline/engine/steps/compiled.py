"""`--train.step compile`: the task's loss, with the model's forward and backward pass in it, compiled by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from drumline.data.steps import Step
from drumline.engine.job import Job
from drumline.engine.steps.eager import LossFunction, LossParts, TrainStep, loss_function
from drumline.errors import log

_EARLY = "force_non_lazy_backward_lowering"


class CompiledStep:
    """Full batches are compiled; the short one at the end of an epoch is not worth a compilation of its own."""

    def __init__(self, job: Job, **settings: Any) -> None:
        self._batch_size = job.batch.size
        self._full = TrainStep(job, compute_loss=compiled(loss_function(job.task)), **settings)
        self._short = TrainStep(job, **settings)
        self.grad_norm: Tensor | None = None
        """Of the latest step, before clipping; on the device."""

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        inner = self._full if step.plan.global_size == self._batch_size else self._short
        inner(step)
        self.grad_norm = inner.grad_norm


def compiled(function: LossFunction) -> LossFunction:
    """The same function, compiled when it is first called; if that fails it stays as it is, and the log says so."""
    from torch._functorch import config as functorch_config  # which takes a while, and few need it

    # The backward pass too: torch would else compile it in the first one, where it is too late to fall back.
    if hasattr(functorch_config, _EARLY):
        setattr(functorch_config, _EARLY, True)
    compiled_function = torch.compile(function)
    is_off = False

    def parts(model: nn.Module, batch: Any) -> LossParts:
        nonlocal is_off
        if is_off:
            return function(model, batch)
        try:
            return compiled_function(model, batch)
        except torch._dynamo.exc.TorchDynamoException as error:
            is_off = True
            log.warning(
                f"steps are not compiled but run operation by operation, because torch.compile failed: {_reason(error)}"
            )
            return function(model, batch)

    return parts


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Error" in line or "compiler" in line), lines[0] if lines else repr(error))
