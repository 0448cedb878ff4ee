"""Hooks: code of the user's that runs between steps, around evaluations and saves, and when a run
ends or fails.

A task lists them in `hooks()`. At each moment all of them run, on every rank, in the order of that
list; after an evaluation in reverse order, so that hooks that change the model for it nest. They
run between steps, never inside one, so a compiled or captured step skips none of them.
`ready_hooks` has the usual ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drumline.base.errors import UsageError
from drumline.config.schema import Config
from drumline.metrics.logged import logged_fields


@dataclass(kw_only=True, eq=False)
class Run:
    """The run as a hook sees it, at the moment of the call."""

    task: Any
    """The `Task`."""

    model: nn.Module
    """The task's own, on the device."""

    config: Config
    total_steps: int
    rank: int
    world_size: int
    device: torch.device
    folder: Path
    """The run folder."""

    step: int = 0
    """The optimizer steps done so far."""

    epoch: int = 1
    """The epoch of the latest step, counted from 1."""

    metrics: Mapping[str, Any] = field(default_factory=dict)
    """What the latest evaluation measured; empty before the first."""

    has_eval_data: bool = True
    """Whether there are evaluations."""

    stop_reason: str | None = None
    """What `stop` was called with on this rank, until all ranks have stopped."""

    _optimizer: Optimizer | None = field(repr=False)
    _report: Callable[..., None] | None = field(repr=False)
    """None where nothing is written, as in `drumline evaluate`."""

    _autocast: AbstractContextManager[object] = field(default_factory=nullcontext, repr=False)
    """That of the run's forward passes (`--train.precision`)."""

    _shared_weights: Callable[[], AbstractContextManager[object]] = field(
        default=nullcontext, repr=False
    )

    @property
    def optimizer(self) -> Optimizer:
        """That of the training; a checkpoint is evaluated without one."""
        if self._optimizer is None:
            raise UsageError(
                "a checkpoint is evaluated without an optimizer",
                next_step="keep what before_evaluation() needs in the state_dict() of the hook, as drumline.EMA does",
            )
        return self._optimizer

    def shared_weights(self) -> AbstractContextManager[object]:
        """In it `model` has the weights that all ranks share: with `--dist.sync local:H` or
        `diloco:H` those of the last round, as evaluations and checkpoints do; otherwise those that
        it has anyway."""
        return self._shared_weights()

    def log(self, name: str, value: Any) -> None:
        """Log a number (or a tensor with one), text, or an image: an array or tensor of HxW, HxWx3
        or 3xHxW, in uint8 or in floats from 0 to 1. Call it on every rank or on rank 0: only rank 0
        writes. A tensor on the GPU is waited for."""
        if self.rank != 0 or self._report is None:
            return
        fields = logged_fields(name, value, step=self.step, folder=self.folder)
        self._report("logged", step=self.step, **fields)

    def stop(self, reason: str) -> None:
        """End the run early, from any rank: all ranks end together, after the next log line or
        evaluation, with the evaluation and the save of a finished run. Started again, it counts as
        finished, unless `train.epochs` or `train.steps` was raised."""
        self.stop_reason = self.stop_reason or reason


class Hook:
    """Override the moments that you need, and `state_dict` and `load_state_dict` if the hook
    remembers something.

    Every rank calls them, so a method may use collectives, except `failure`. What a method raises
    ends the run. Random numbers that `start`, `load_state_dict` and `after_save` draw do not change
    those of the training."""

    every_steps = 1
    """`after_step` is called when the number of steps done is a multiple of this."""

    def start(self, run: Run) -> None:
        """Before the first step of each start; a resumed run has called `load_state_dict`
        before."""

    def after_step(self, run: Run) -> None:
        """After every `every_steps` steps, before the log line, the evaluation and the save of that
        step."""

    def before_evaluation(self, run: Run) -> None:
        """Before each evaluation."""

    def after_evaluation(self, run: Run) -> None:
        """After each evaluation: `run.metrics` has its numbers, the same on every rank."""

    def before_save(self, run: Run) -> None:
        """Before a checkpoint is made: the last moment for `state_dict` to change."""

    def after_save(self, run: Run) -> None:
        """When the state is copied; the checkpoint may still be being written beside the next
        steps, and does not hold what changes here: a `stop` is forgotten if the run is killed
        before the next save."""

    def end(self, run: Run) -> None:
        """After the last step of a run that has finished or was stopped by `Run.stop`; not when it
        is preempted. On rank 0 the last checkpoint is complete."""

    def failure(self, run: Run, error: BaseException) -> None:
        """On a rank that fails with an error of its own, before it exits; not on those that only
        lost that rank. No collectives: the other ranks may not be there."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the hook: numbers, text, tensors, and lists, tuples and dicts
        of them; the same on every rank. Rank 0's is saved. Also called once at the start, so that
        what cannot be saved is found there."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The state of the checkpoint that the run resumes from, on every rank, with its tensors on
        the CPU."""
