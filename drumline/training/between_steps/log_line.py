"""The log line of a run: the loss and the speed since the last one; and what to do about a run that
waits for data, from what is measured between the lines: the share of the time, whether the device
was idle meanwhile, the CPU time of the workers, and one sample."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
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
from drumline.metrics.meters import means
from drumline.rank.collectives import all_sum
from drumline.training.between_steps.non_finite import NonFinite
from drumline.training.between_steps.throughput import DdpStepTimes, ExposedCommunication, Speed
from drumline.training.output import WatchNotices
from drumline.training.run_context import Action, RunContext
from drumline.training.steps.compilation import report_recompilations

MIN_SHARE = 0.2
MIN_S = 10.0
MAX_STEPS_LEFT = 1.5  # of the device when the loop asks for the loss; with more, it was not idle
# Of a core; with less, workers wait for storage, and there may be more of them than cores.
MIN_LOAD = 0.5
WORKERS_PER_CORE = 4
MIN_GAIN = 1.25  # as many workers
SMALL_SAMPLE = 4096


class RankCounts(NamedTuple):
    """What a rank has counted so far; the ranks sum it with each log line."""

    num_compiled: float
    """Compilations since the last log line."""
    num_compiled_later: float
    """Of these, those after the first step."""
    tokens: float
    waited_s: float
    start_tokens: float
    start_waited_s: float
    exposed_s: float
    computing_s: float
    """Of the step that was measured last, as `exposed_s`. NaN: unknown."""


class LogSums(NamedTuple):
    """What is summed over all ranks for a log line."""

    ranks: RankCounts
    num_votes: float
    """Ranks on which a hook has asked to end the run."""
    measured: list[float]
    """As `Meter.take` returns it."""
    num_bad: float
    """Steps that were not finite."""
    blocked_s: float
    """How long this rank waited for the sums, and so for its device."""


class LogTraining(Action):
    """Every `log.every_steps` steps: the loss since the last line."""

    name = "log"

    def __init__(self, context: RunContext, non_finite: NonFinite, notices: WatchNotices) -> None:
        self.interval = context.config.log.every_steps
        self._progress = context.progress
        self._first_step = context.progress.step
        self._non_finite = non_finite
        self._notices = notices
        self._data_advice: DataAdvice | None = None
        self._spent_s: dict[str, float] = {}
        self._waited_s = 0.0

    def start(self, context: RunContext) -> None:
        self._communication = ExposedCommunication(context.job)

    def due(self, step: int) -> bool:
        return step % self.interval == 0 or step >= self._progress.last_step

    def run(self, context: RunContext) -> None:
        job = context.job
        step = context.progress.step
        sums = self._reduce(context)
        self._non_finite.act_on(sums.num_bad)  # before the task's report() gets a NaN
        numbers = job.reported(means(sums.measured, job.meter.names))
        if job.finite.grad_norm is not None:
            numbers["grad_norm"] = float(job.finite.grad_norm)
        speed = self._lap(context, sums.ranks)
        self._report_phases(context)
        context.reporter.report(
            "train",
            step=step,
            epoch=context.epoch,
            lr=job.rates.highest(),
            **asdict(speed),
            seconds_left=context.throughput.seconds_for(context.total_steps - step),
            **numbers,
        )
        self._notices.report(context.reporter)
        self._advise(context, speed, sums.blocked_s)
        if sums.ranks.num_compiled:
            report_recompilations(context, self._first_step)
        context.end_if(sums.num_votes)

    def _reduce(self, context: RunContext) -> LogSums:
        """Collective: one reduction for all that a log line needs."""
        job = context.job
        counts = job.finite.counts
        this_rank = self._counts(context)
        counted = [counts.new_full((1,), number) for number in this_rank]
        if context.hooks is not None:
            counted.append(context.hooks.vote(counts))
        counted += [job.meter.take(), counts]
        began = time.perf_counter()
        reduced = all_sum(torch.cat(counted)).tolist()
        blocked_s = time.perf_counter() - began
        *measured, num_bad, _ = reduced[len(this_rank) :]
        num_votes = 0.0 if context.hooks is None else measured.pop(0)
        if num_bad and not measured[1]:  # all were skipped
            measured = [math.nan, 1.0, *[math.nan] * len(job.meter.names)]
        ranks = RankCounts(*reduced[: len(this_rank)])
        return LogSums(ranks, num_votes, measured, num_bad, blocked_s)

    def _advise(self, context: RunContext, speed: Speed, blocked_s: float) -> None:
        """On rank 0: advice about waiting for data, from the second log line on."""
        job = context.job
        if self._data_advice is not None:
            waited_s = job.loader.waited_s - self._waited_s
            waited_share = waited_s / max(context.throughput.lap_s, 1e-9)
            steps_left = blocked_s * speed.samples_per_s / job.batch.size
            self._data_advice.check(context, waited_share, steps_left)
        elif job.ddp.is_main_process():
            self._data_advice = DataAdvice(context)
        self._waited_s = job.loader.waited_s

    def _counts(self, context: RunContext) -> RankCounts:
        job = context.job
        throughput = context.throughput
        compilations = job.ddp.connection.compilations
        compiled_at = [] if compilations is None else list(compilations.began_at.values())
        measured = self._communication.newest(context.progress.step)
        return RankCounts(
            num_compiled=len(compiled_at),
            num_compiled_later=sum(step > self._first_step for step in compiled_at),
            tokens=job.loader.num_tokens,
            waited_s=job.loader.waited_s,
            start_tokens=throughput.start_tokens,
            start_waited_s=throughput.start_waited_s,
            exposed_s=math.nan if measured is None else measured.exposed_s,
            computing_s=math.nan if measured is None else measured.computing_s,
        )

    def _lap(self, context: RunContext, ranks: RankCounts) -> Speed:
        """`ranks`: the sums over all ranks."""
        world_size = context.job.ddp.world_size
        measured = None
        if not math.isnan(ranks.exposed_s):
            measured = DdpStepTimes(ranks.exposed_s / world_size, ranks.computing_s / world_size)
        return context.throughput.lap(
            waited_s=ranks.waited_s / world_size,
            tokens=ranks.tokens,
            measured=measured,
            start_waited_s=ranks.start_waited_s / world_size,
            start_tokens=ranks.start_tokens,
            has_compiled=ranks.num_compiled_later > 0,
        )

    def _report_phases(self, context: RunContext) -> None:
        """What this rank's time went to since the last line; the first line has the start of the
        run, too."""
        before = self._spent_s
        self._spent_s = context.job.heartbeat.spent_s()
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in self._spent_s.items()}
        phases_s = {name: round(seconds, 6) for name, seconds in spent.items() if seconds > 0}
        context.reporter.report("phases", step=context.progress.step, phases_s=phases_s)


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
