"""To call the task's loss outside a training step, and leave no trace of it in the run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from drumline.checkpoint.rng import capture_rng, restore_rng
from drumline.distributed.buffers import LiveBuffers
from drumline.engine.job import Job
from drumline.tasks.base import Task


@contextmanager
def rehearsed(job: Job) -> Iterator[Task]:
    """A copy of the task to call. Afterwards random numbers, buffers, modes and what modules keep are as they were."""
    rng, buffers = capture_rng(job.ddp.device), LiveBuffers(job.model)
    before = buffers.keep()
    attributes = [(module, dict(vars(module))) for module in job.model.modules()]
    try:
        # What its loss sets, to count calls for example, is set in the copy.
        yield copy.copy(job.task)
    finally:
        for module, kept in attributes:
            vars(module).clear()
            vars(module).update(kept)
        buffers.put_back(before)
        restore_rng(rng, job.ddp.device)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Each module gets its own mode back: a user may have put parts of the model into eval mode for good."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
