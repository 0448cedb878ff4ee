"""`--train.on_nan`: what the loop does about non-finite steps (`FiniteSteps` counts them), and how
it finds the cause: all ranks run the batch of the first such step again and check the output of
every module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from drumline.base.errors import NonFiniteError, Place
from drumline.checkpoint.finite import first_non_finite
from drumline.checkpoint.state import capture
from drumline.data.loader import IndexedLoader
from drumline.rank.collectives import all_sum, gather_json
from drumline.rank.torch_internals import pytree
from drumline.training.job.job import Job
from drumline.training.run_context import RunContext
from drumline.training.steps.eager import loss_function
from drumline.training.steps.warm_up import dry_run


class NonFinite:
    """Reads the counts of non-finite steps, and acts on them: `stop` raises, `warn` and `skip`
    report them with the log line."""

    def __init__(self, context: RunContext) -> None:
        self._warn = context.warn
        self._job = context.job
        self._progress = context.progress
        self._on_nan = context.config.train.on_nan

        self._read_step = context.progress.step
        self._read_cursor = context.progress.cursor
        self._is_resumed = context.progress.step > 0

        self._is_explained = False
        """The cause was looked for."""

        self._is_state_reported = False
        self._num_skipped = 0

    def check(self) -> None:
        """Collective: `stop` reads the counts, unless that was done after this step; the others
        read them to log."""
        if self._on_nan == "stop" and self._read_step != self._progress.step:
            self.read()

    def read(self) -> None:
        """Collective: read the counts now, which waits for the device."""
        self.act_on(all_sum(self._job.finite.counts.clone()).tolist()[0])

    def act_on(self, num_bad: float) -> None:
        """Collective: `num_bad` is the sum over all ranks."""
        if num_bad:
            self._report()
            self._job.finite.counts.zero_()

        self._read_step = self._progress.step
        self._read_cursor = self._progress.cursor

    def _report(self) -> None:
        """Collective: raise or warn, with the first step that was not finite, and why."""
        num_skipped, place, cause = self._locate()
        why = f": {cause}" if cause else ""

        match self._on_nan:
            case "stop":
                raise NonFiniteError(
                    f"the loss is not finite{why}", next_step=self._next_step(), place=place
                )
            case "warn":
                self._warn(f"the loss is not finite since step {place.step}{why} [{place}]")
            case "skip":
                self._num_skipped += num_skipped
                self._warn(
                    f"updates that were not finite were skipped: {num_skipped}, the first at step {place.step} "
                    f"({self._num_skipped} since the start){why} [{place}]"
                )
            case _:
                assert_never(self._on_nan)

    def check_state(self) -> str | None:
        """Collective, before a save: the first non-finite tensor on any rank, such as
        `model/fc.weight`. With `stop` it is an error."""
        job = self._job
        tensors = {}
        for file, tensors_in_file in capture(job.model, job.optimizer, progress={}).tensors.items():
            for name, tensor in tensors_in_file.items():
                tensors[f"{file}/{name}"] = tensor

        ranks = gather_json([first_non_finite(tensors), job.ddp.host])
        bad_ranks = [rank for rank, (name, _) in enumerate(ranks) if name is not None]
        if not bad_ranks:
            return None

        name, host = ranks[bad_ranks[0]]
        place = Place(host, bad_ranks[0], self._progress.step)
        if self._on_nan == "stop":
            raise NonFiniteError(f"{name} is not finite", next_step=self._next_step(), place=place)

        if not self._is_state_reported:
            self._is_state_reported = True
            self._warn(f"{name} is not finite; the checkpoint is marked [{place}]")

        return str(name)

    def _locate(self) -> tuple[int, Place, str | None]:
        """Collective: how many steps were not finite, where the first was, and its cause if known.
        The cause is looked for once in a run."""
        num_bad, num_since = map(int, self._job.finite.counts.tolist())
        first = self._progress.step - num_since + 1 if num_since else None

        ranks: list[Any] = gather_json([num_bad, first])
        first_steps = [first for _, first in ranks]
        step = min(first for first in first_steps if first is not None)

        cause = None if self._is_explained else self._explain(step)
        self._is_explained = True
        causes = gather_json([self._job.ddp.host, cause])

        bad_ranks = [rank for rank, first in enumerate(first_steps) if first == step]
        explained = [rank for rank in bad_ranks if causes[rank][1] is not None]  # know the cause

        rank = [*explained, *bad_ranks][0]
        host, cause = causes[rank]
        most_bad = max(num_bad for num_bad, _ in ranks)

        return most_bad, Place(host, rank, step), cause

    def _explain(self, step: int) -> str | None:
        """Collective: run the batch of that step again. A stream cannot be read again, but if the
        weights are too large, the next batch shows it, too. None: the cause is unknown."""
        job = self._job
        parameter = first_non_finite(dict(job.model.named_parameters()))

        # A forward pass of a sharded model is collective: either all ranks run one, or none.
        is_sharded = job.sharded is not None
        if is_sharded:
            parameter = next(filter(None, gather_json(parameter)), None)

        if parameter is not None:
            cause = f"the parameter {parameter} was not finite before it, so an earlier gradient was not"
            return cause if job.finite.keeps_weights else None

        prefix = ""
        reasons: list[str] = []

        # The task's code runs here: an error in it must not hide the NaN, unless other ranks wait
        # in its forward pass.
        with nullcontext() if is_sharded else suppress(Exception):
            if isinstance(job.loader, IndexedLoader):
                num_before = step - self._read_step - 1
                batches = job.loader.batches_after(self._read_cursor, num_before)
            else:
                prefix = "with the next batch, "
                batches = iter([job.loader.preview()])

            explain(job, batches, reasons)

        return f"{prefix}{reasons[0]}" if reasons else None

    def _next_step(self) -> str:
        """What to do after `stop`: resume, if there is a checkpoint."""
        has_checkpoint = self._is_resumed or self._progress.saved_step is not None
        resume = " to resume from the newest finite checkpoint" if has_checkpoint else ""
        return (
            "check the data and the learning rate (--optim.lr, --optim.clip_norm), then rerun the same command"
            f"{resume}; --train.on_nan skip leaves such updates out"
        )


@torch.no_grad()
def explain(job: Job, batches: Iterable[Any], reasons: list[str]) -> None:
    """Collective if the model has collectives: run all these batches, and add what is not finite to
    `reasons`, in the order in which it is found: the batch, a module's output, the loss."""
    names = {module: name for name, module in job.model.named_modules()}

    def check_output(module: nn.Module, arguments: Any, output: Any) -> None:
        """torch calls it after each module: the first with a bad output is the first reason."""
        if first_non_finite(_tensors(output)) is not None:
            name = f"{names[module] or 'the model'} ({type(module).__name__})"
            reasons.append(f"{name} is the first module with a non-finite output")

    with dry_run(job) as task, ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_hook(check_output).remove)

        for batch in batches:
            if batch is None:  # this rank has no part of it
                continue

            if first_non_finite(_tensors(batch)) is not None:
                reasons.append("the batch holds NaN or infinity")

            with job.autocast:
                total = float(loss_function(task)(job.model, batch).total)

            if not math.isfinite(total):
                reasons.append(
                    f"every module's output is finite, but {type(task).__name__}.loss() returns {total}"
                )


def _tensors(batch: Any) -> dict[str, Tensor]:
    """All tensors in nested lists, tuples and dicts, by their number in it."""
    leaves = enumerate(pytree.tree_leaves(batch))
    return {str(number): leaf for number, leaf in leaves if isinstance(leaf, Tensor)}
