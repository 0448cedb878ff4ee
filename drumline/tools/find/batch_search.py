"""The search of `drumline find-batch`: the largest micro-batch with which a step fits in the GPU's
memory, by taking steps, and how fast each size is."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drumline.base.errors import TrainingError, UsageError
from drumline.config.schema import Config
from drumline.data.loader import MicroBatch, Step
from drumline.data.sharding import Cursor, StepPlan, plan_step
from drumline.data.stream_loader import StreamLoader
from drumline.parallel.wrap import has_batchnorm
from drumline.rank.collectives import gather_json
from drumline.rank.torch_internals import pytree
from drumline.training.job.job import Job, build_job
from drumline.training.job.optimizer import LearningRates
from drumline.training.manager import RunManager
from drumline.training.steps.eager import TrainStep
from drumline.training.tasks.base import Task
from drumline.watch.failure_kind import FailureKind, failure_kind

# What libraries raise in place of torch.OutOfMemoryError when there is no memory for their
# workspace.
NO_MEMORY_TEXTS = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "unable to find an engine to execute this computation",
)
# More micro-batches than this in a step change neither its memory nor its speed by much.
MOST_AT_A_TIME = 4
# Bisection ends when the interval is this fraction of the size.
PRECISION = 16


@dataclass(frozen=True)
class Trial:
    """What a step with micro-batches of this size needed, over all ranks."""

    size: int
    fits: bool
    """On every rank."""
    samples_per_s: float
    """Of all ranks together, at the speed of the slowest, without loading data."""
    memory: int
    """Bytes that torch has reserved, on the rank with the most; 0 on the CPU."""


@dataclass(frozen=True)
class BatchSearch:
    """All sizes that were tried, in that order; the same on every rank."""

    trials: Sequence[Trial]
    limit: int
    """What a rank has of a global batch: there is no larger micro-batch."""
    batch_size: int
    measures_memory: bool

    @property
    def fastest(self) -> Trial:
        """The size with the most samples a second."""
        return max(self._fitting, key=lambda trial: trial.samples_per_s)

    @property
    def chosen(self) -> Trial:
        """The largest that fits; on the CPU, where that is not known, the fastest."""
        if not self.measures_memory:
            return self.fastest

        return max(self._fitting, key=lambda trial: trial.size)

    @property
    def _fitting(self) -> list[Trial]:
        """At least one: without any there is no result."""
        return [trial for trial in self.trials if trial.fits]


def search_batch(
    config: Config,
    task_class: type[Task],
    ddp: RunManager,
    *,
    margin: float,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> BatchSearch:
    """Collective: try sizes on the job that `drumline train` would build. Nothing is written.
    `margin`: the fraction of the GPU's memory that a step has to leave free."""
    if config.dist.mode != "ddp" and ddp.world_size > 1:
        # Every forward pass is collective: a rank that runs out of memory would leave the others
        # waiting in it.
        raise UsageError(
            f"find-batch cannot try batches in mode {config.dist.mode} on several ranks",
            next_step="use `drumline plan TASK`, which predicts the memory of every mode",
        )

    config = replace(config, train=replace(config.train, accumulate=1, micro_batch_size=None))
    job = build_job(config, task_class(config), ddp, step_kind=config.train.step or "eager")
    on_gpu = ddp.device.type == "cuda"

    trials: list[Trial] = []
    try:
        # Weights stay as they are, so that no trial ends in a NaN.
        LearningRates(job.optimizer, config.optim, lambda *_: 0.0).set(0, 1)
        step = TrainStep(job, clip_norm=config.optim.clip_norm, sends_buffers=False)
        # The first step as rank 0 sees it, which has the most samples: all ranks must try the same
        # sizes.
        length = min(job.batch.size, job.loader.num_samples or job.batch.size)
        plan = plan_step(Cursor(), length=length, sharding=replace(job.loader.sharding, rank=0))
        limit = plan.spans[0].size
        smallest = min(limit, 2 if has_batchnorm(job.model) else 1)

        def fits(size: int) -> bool:
            """Try a size; its result is kept."""
            trials.append(_try(job, step, plan, size))
            on_trial(trials[-1])
            return trials[-1].fits

        has_begun = _begin(job, step, plan, smallest, margin if on_gpu else None)
        if not has_begun or not largest(fits, smallest, limit):
            raise TrainingError(
                f"a step with micro-batches of {smallest} does not fit in memory",
                next_step="--model.activation_checkpointing, --train.precision bf16 or a smaller model",
            )
    finally:
        job.close()
        if on_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0, ddp.device)

    return BatchSearch(trials, limit, job.batch.size, on_gpu)


def largest(fits: Callable[[int], bool], smallest: int, limit: int) -> int:
    """The largest size up to `limit` that fits, found by doubling and then bisection; 0: none
    does.

    Where at most 20 fit, of 64: 1, 2, 4, 8, 16 and 32 are tried, then 24, 20, 22 and 21.
    """
    low = 0
    high = smallest
    while fits(high):
        low, high = high, min(2 * high, limit)
        if low == limit:
            return low

    while low and high - low > max(1, low // PRECISION):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle

    return low


def _begin(job: Job, step: TrainStep, plan: StepPlan, smallest: int, margin: float | None) -> bool:
    """Collective: a first step, in which the ranks communicate: from here on the optimizer's state
    and the buffers of DDP and NCCL are there, as in a run. What is then left of the GPU's memory,
    less the margin, is for the trials. Returns whether the step fits."""
    try:
        step(_make_step(job, plan, smallest, count=1, syncs=True))
    except torch.OutOfMemoryError:
        return False

    if margin is not None:
        free, total = torch.cuda.mem_get_info(job.ddp.device)
        usable = (free + torch.cuda.memory_reserved(job.ddp.device)) * (1 - margin)
        torch.cuda.set_per_process_memory_fraction(min(1.0, usable / total), job.ddp.device)

    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory has run out, in words of torch or a library."""
    if failure_kind(error) is FailureKind.OUT_OF_MEMORY:
        return True

    return any(text in str(error) for text in NO_MEMORY_TEXTS)


def _try(job: Job, step: TrainStep, plan: StepPlan, size: int) -> Trial:
    """Collective, but only at its end: memory may run out on one rank, and the others must not wait
    for it."""
    device = job.ddp.device
    count = min(MOST_AT_A_TIME, -(-plan.spans[0].size // size))
    seconds = 0.0
    memory = 0

    try:
        for _ in range(2):  # the first one reserves memory and chooses kernels
            seconds = _timed(step, _make_step(job, plan, size, count=count, syncs=False), device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        seconds = 0.0

    # After the error is released, which holds the tensors of the step.
    job.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        memory = torch.cuda.max_memory_reserved(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    measured = gather_json([seconds, memory])
    seconds_of_ranks = [rank_seconds for rank_seconds, _ in measured]
    fits = all(seconds_of_ranks)
    speed = size * count * len(measured) / max(seconds_of_ranks) if fits else 0.0

    return Trial(size, fits, speed, max(rank_memory for _, rank_memory in measured))


def _timed(train_step: TrainStep, step: Step, device: torch.device) -> float:
    """The seconds of a step, until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

    began = time.perf_counter()
    train_step(step)
    if device.type == "cuda":
        torch.cuda.synchronize(device)

    return time.perf_counter() - began


def _make_step(job: Job, plan: StepPlan, size: int, *, count: int, syncs: bool) -> Step:
    """A step of `count` micro-batches of the task's own data. Two batches are on the device at a
    time, as in a run, where one is computed while the next is copied. `syncs`: whether ranks
    communicate in it."""
    batches = [_batch(job, size) for _ in range(min(count, 2))]
    micro_batches = []
    for number in range(count):
        data = batches[number % len(batches)]
        is_last = syncs and number == count - 1
        micro_batches.append(MicroBatch(data, size, is_last=is_last, shard=0, ends_shard=False))

    return Step(plan, iter(micro_batches))


def _batch(job: Job, size: int) -> Any:
    """A batch of the task's own data."""
    batch = job.loader.preview(size)
    if not isinstance(job.loader, StreamLoader):
        return batch

    # A stream's batch is already made, as large as a rank's part of the global batch.
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[:size] if leaf.dim() else leaf, batch)
