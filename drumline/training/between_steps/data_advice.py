"""What to do about a run that waits for data, from what is measured between steps: the share of the
time, whether the device was idle meanwhile, the CPU time of the workers, and one sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import torch

from drumline.base.errors import as_list
from drumline.base.processes import usable_cpus
from drumline.base.text import duration, file_size, plural
from drumline.data.dataset import BatchMaker, BatchRequest, is_in_two_parts, makes_batches
from drumline.data.delivery import MOST_OF_FREE, leaves
from drumline.data.loader import IndexedLoader
from drumline.data.workers import WorkerTimes
from drumline.training.run_context import RunContext

MIN_SHARE = 0.2
MIN_S = 10.0
MAX_STEPS_LEFT = 1.5  # of the device when the loop asks for the loss; with more, it was not idle
# Of a core; with less, workers wait for storage, and there may be more of them than cores.
MIN_LOAD = 0.5
WORKERS_PER_CORE = 4
MIN_GAIN = 1.25  # as many workers
SMALL_SAMPLE = 4096


class LoadingFacts(NamedTuple):
    """How a rank loads its data, with its part of the cores that the job may use."""

    cores: int
    workers: int
    worker_load: float | None = None
    """The fraction of a core that each worker uses; None: there are no workers."""
    is_stream: bool = False
    restarts_for_epochs: bool = False
    fits: str | None = None
    """The size of the dataset, if it could stay on the device."""
    float_sample: str | None = None
    """The size and type of a sample that could be bytes on its way to a GPU."""


class DataAdvice:
    """Gives advice once, when the loop has waited for data in all log intervals of the last
    seconds."""

    def __init__(self, context: RunContext) -> None:
        """After the first log interval, which has the start of the workers in it."""
        self._is_given = False
        self._begin(context)

    def _begin(self, context: RunContext) -> None:
        self._began_s = context.throughput.seconds
        self._waited_before_s = context.job.loader.waited_s
        self._began_epoch = context.epoch
        self._worker_times: WorkerTimes | None = None

    def check(self, context: RunContext, share: float, steps_left: float) -> None:
        """After each later log interval, on rank 0. `steps_left`: how many the device had not
        finished by then."""
        producer = context.job.loader._producer
        seconds = context.throughput.seconds - self._began_s
        if share < MIN_SHARE or steps_left > MAX_STEPS_LEFT:
            self._begin(context)
        elif self._worker_times is None and producer.num_workers and not self._is_given:
            self._worker_times = producer.worker_times()
        elif seconds >= MIN_S and not self._is_given:
            self._is_given = True
            waited_s = context.job.loader.waited_s - self._waited_before_s
            share = min(1.0, waited_s / max(seconds, 1e-9))
            has_new_epoch = context.epoch > self._began_epoch
            facts = _facts(context, self._worker_times, has_new_epoch=has_new_epoch)
            context.note(
                f"rank 0 on {context.job.ddp.host} {advice(facts, share=share, seconds=seconds)}"
            )


def _facts(context: RunContext, before: WorkerTimes | None, *, has_new_epoch: bool) -> LoadingFacts:
    ddp = context.job.ddp
    data = context.config.data
    loader = context.job.loader
    workers = loader._producer.num_workers
    facts = LoadingFacts(
        cores=max(1, int(usable_cpus() // ddp.local_world_size)),
        workers=workers,
        worker_load=_load(before, loader._producer.worker_times()),
        is_stream=not isinstance(loader, IndexedLoader),
        restarts_for_epochs=has_new_epoch and workers > 0 and not data.persistent_workers,
    )
    if isinstance(loader, IndexedLoader) and ddp.device.type == "cuda" and not data.resident:
        with suppress(Exception):  # whatever the user's dataset does here, training continues
            fits, float_sample = _sizes(loader._maker, ddp.device)
            return facts._replace(fits=fits, float_sample=float_sample)
    return facts


def _load(before: WorkerTimes | None, now: WorkerTimes | None) -> float | None:
    """The fraction of a core that each worker has used since then, on average; None: there are
    none, or new ones."""
    if before is None or now is None or before.pids != now.pids:
        return None
    return (now.cpu_s - before.cpu_s) / max(now.age_s - before.age_s, 1e-9)


def _sizes(maker: BatchMaker, device: torch.device) -> tuple[str | None, str | None]:
    """`fits` and `float_sample`."""
    tensors = leaves(maker[BatchRequest(0, 0, 1, shuffled=True)])
    largest = max(tensors, key=lambda leaf: int(leaf.nbytes))
    total = sum(leaf.nbytes for leaf in tensors) * maker.length
    free = torch.cuda.mem_get_info(device)[0]
    fits = is_in_two_parts(maker.dataset) and total <= MOST_OF_FREE * free
    could_be_bytes = (
        largest.is_floating_point()
        and largest.nbytes >= SMALL_SAMPLE
        and not makes_batches(maker.dataset)
    )
    sample = f"{file_size(largest.nbytes)} of {str(largest.dtype).removeprefix('torch.')}"
    return file_size(total) if fits else None, sample if could_be_bytes else None


def advice(facts: LoadingFacts, *, share: float, seconds: float) -> str:
    """What was measured, then the most useful one or two things to try."""
    each = "" if facts.worker_load is None else f" (each uses {facts.worker_load:.0%} of a core)"
    has = f"{plural(facts.workers, 'worker')}{each} and {plural(facts.cores, 'core')}"
    first = f"waited for data {share:.0%} of the last {duration(seconds)}; it has {has}"
    return as_list(f"{first}; try:", islice(_remedies(facts, share), 2))


def _remedies(facts: LoadingFacts, share: float) -> Iterator[str]:
    waits_for_storage = facts.worker_load is not None and facts.worker_load < MIN_LOAD
    # As many as make a batch in the time of a step. Without workers, the loop makes batches while
    # it waits.
    needed = math.ceil((facts.workers or share) / max(1 - share, 0.01))
    most = 1
    if not facts.is_stream:
        most = max(1, facts.cores - 1) * (WORKERS_PER_CORE if waits_for_storage else 1)
    if facts.fits is not None:
        yield f"--data.resident: the {facts.fits} of this dataset fit into the GPU's memory"
    if facts.restarts_for_epochs:
        yield "leave --no-data.persistent_workers out: workers are started again for every epoch"
    num_workers = min(needed, most)
    more_workers = []
    if num_workers >= MIN_GAIN * facts.workers:
        more_workers = [f"--data.workers {num_workers}"]
    if needed <= most:
        yield from more_workers
    if facts.float_sample is not None:
        yield (
            f"of images return uint8 (now {facts.float_sample}), and do the rest for the whole batch in on_device(): "
            'docs/data.md, "Your own dataset, fast"'
        )
    if needed > most:
        yield from more_workers
    if waits_for_storage:
        yield "a larger --data.prefetch_factor: workers are idle while a batch is late"
    yield "store the samples so that they take less time to read: decoded and resized"
