"""`--train.on_nan`: what the loop does about steps that were not finite, and how it finds out where that began.

Steps count on the device (`steps/finite`). The loop reads the count where it waits for the device anyway: with a log
line, and before replicas are compared or saved. Where there was such a step, all ranks run its batch once more, with a
look at the output of every module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from drumline.checkpoint.state import capture
from drumline.data.loader import Loader
from drumline.distributed.collectives import all_sum, gather_json
from drumline.engine.job import Job
from drumline.engine.saving import Progress
from drumline.engine.steps.finite import OnNan, largest
from drumline.engine.steps.rehearsal import rehearsed
from drumline.errors import NonFiniteError, Place
from drumline.metrics.events import Reporter

MEND = (
    "check the data and the learning rate (--optim.lr, --optim.clip_norm), then rerun the same command to resume from "
    "the newest finite checkpoint; --train.on_nan skip leaves such updates out"
)


class NonFinite:
    """Reads what the steps have counted, and acts on it."""

    def __init__(self, job: Job, progress: Progress, *, on_nan: OnNan, reporter: Reporter) -> None:
        self._job = job
        self._progress = progress
        self._on_nan = on_nan
        self._reporter = reporter
        self._read_at = (progress.step, progress.cursor)
        self._is_explained = False
        self.num_skipped = 0

    def check(self) -> None:
        """Collective: `stop` reads the counts, which waits for the device; the others wait for the log line."""
        if self._on_nan == "stop":
            self.act_on(all_sum(self._job.finite.counts.clone()).tolist()[0])

    def act_on(self, num_bad: float) -> None:
        """Collective: `num_bad` is the count of all ranks together."""
        if num_bad:
            self._act()
            self._job.finite.counts.zero_()
        self._read_at = (self._progress.step, self._progress.cursor)

    def check_state(self) -> str | None:
        """Before a save: the first tensor of it that is not finite, if one is. `stop` does not save it."""
        state = capture(self._job.model, self._job.optimizer, progress={}).tensors
        name = first_non_finite(
            {f"{file}/{name}": one for file in state for name, one in state[file].items()}
        )
        if name is None:
            return None
        what = f"{name} is not finite, though every loss was: a gradient was too large or not a number"
        if self._on_nan == "stop":
            ddp = self._job.ddp
            raise NonFiniteError(what, next_step=MEND, place=Place(ddp.host, ddp.rank, self._progress.step))
        self._reporter.report("warning", step=self._progress.step, message=what)
        return name

    def _act(self) -> None:
        num_bad, num_since = map(int, self._job.finite.counts.tolist())
        step, place, cause = self._locate(num_since)
        if self._on_nan == "stop":
            raise NonFiniteError(f"the loss is not finite: {cause}", next_step=MEND, place=place)
        if self._on_nan == "warn":
            message = f"the loss is not finite since step {step}: {cause} [{place}]"
        else:
            self.num_skipped += num_bad
            message = (
                f"updates that were not finite were skipped: {num_bad}, the first at step {step} ({self.num_skipped} "
                f"since the start): {cause} [{place}]"
            )
        self._reporter.report("warning", step=self._progress.step, message=message)

    def _locate(self, num_since: int) -> tuple[int, Place, str]:
        """Collective: the first step that was not finite, where that was, and its cause as far as it can be known."""
        ddp = self._job.ddp
        mine = self._progress.step - num_since + 1 if num_since else None
        found: list[Any] = gather_json(mine, device=ddp.device)
        step = min(one for one in found if one is not None)
        cause = None if self._is_explained else explain(self._job, self._batches_of(step))
        self._is_explained = True
        told = gather_json([ddp.host, cause], device=ddp.device)
        bad = [rank for rank, one in enumerate(found) if one == step]
        rank = next((rank for rank in bad if told[rank][1] is not None), bad[0])
        host, cause = told[rank]
        return step, Place(host, rank, step), cause or _NOT_SEEN[self._on_nan]

    def _batches_of(self, step: int) -> Iterator[Any]:
        loader, (read_step, cursor) = self._job.loader, self._read_at
        if isinstance(loader, Loader):
            return loader.batches_after(cursor, step - read_step - 1)
        return iter(
            [loader.preview()]
        )  # a stream cannot be read again; weights that are too large show with any batch


_NOT_SEEN: Mapping[OnNan, str] = {
    "stop": "run again, its batch gives a finite loss",
    "warn": "run again, its batch gives a finite loss",
    "skip": "a gradient was not finite, or run again, its batch gives a finite loss",
}


@torch.no_grad()
def explain(job: Job, batches: Iterator[Any]) -> str | None:
    """Collective, where the model is: run these batches, all of them, and say what is not finite first."""
    reasons: list[str] = []
    parameters = dict(job.model.named_parameters())
    if (name := first_non_finite(parameters)) is not None:
        reasons.append(f"the parameter {name} was not finite before it, so an earlier gradient was not")
    with rehearsed(job) as task:
        for batch in batches:
            if first_non_finite(dict(enumerate_tensors(batch))) is not None:
                reasons.append("its batch holds NaN or infinity")
            with _watched(job.model, reasons), job.autocast:
                total = task.loss(job.model, batch).total
            if not math.isfinite(float(total)):
                reasons.append(
                    f"every module's output is finite, what {type(task).__name__}.loss() makes of it is not"
                )
    return reasons[0] if reasons else None


def enumerate_tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    leaves = pytree.tree_leaves(batch)
    return ((str(number), leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor))


@contextmanager
def _watched(model: nn.Module, reasons: list[str]) -> Iterator[None]:
    """Inside, the modules whose output is not finite are noted, in the order in which they end."""
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, arguments: Any, output: Any) -> None:
        if first_non_finite(dict(enumerate_tensors(output))) is not None:
            name = f"{names[module] or 'the model'} ({type(module).__name__})"
            reasons.append(f"{name} is the first module with a non-finite output")

    hooks = [module.register_forward_hook(look) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity in it. Waits for the device, once if there is none."""
    numbers = {
        name: torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for name, tensor in tensors.items()
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel()
    }
    if not numbers or math.isfinite(float(largest(numbers.values()))):
        return None
    return next(name for name, tensor in numbers.items() if not bool(torch.isfinite(tensor).all()))
