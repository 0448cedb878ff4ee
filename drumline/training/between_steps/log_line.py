"""The log line of a run: the loss and the speed since the last one; and what to do about a run that
waits for data."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import NamedTuple

import torch

from drumline.base.errors import as_list
from drumline.base.processes import usable_cpus
from drumline.base.text import duration, plural
from drumline.data.loader import IndexedLoader
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
MIN_GAIN = 1.25  # as many workers


class RankCounts(NamedTuple):
    """What a rank has counted so far; the ranks sum it with each log line."""

    num_compiled: float
    """Compilations since the last log line."""
    num_compiled_later: float
    """Of these, those after the first step."""
    tokens: float
    waited_s: float
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
        self._is_first_line = True
        self._has_advised = False
        self._slow_s = 0.0
        self._slow_waited_s = 0.0
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
        """On rank 0, once, a note for a run that has waited for data in all log intervals of some
        seconds, on a device that had no step left to do. The first interval does not count: the
        workers start in it."""
        job = context.job
        lap_s = context.throughput.lap_s
        waited_s = job.loader.waited_s - self._waited_s
        steps_left = blocked_s * speed.samples_per_s / job.batch.size
        is_slow = waited_s >= MIN_SHARE * lap_s and steps_left <= MAX_STEPS_LEFT
        self._waited_s = job.loader.waited_s
        if self._is_first_line or not is_slow:
            self._is_first_line = False
            self._slow_s = 0.0
            self._slow_waited_s = 0.0
            return
        self._slow_s += lap_s
        self._slow_waited_s += waited_s
        if self._slow_s >= MIN_S and not self._has_advised and job.ddp.is_main_process():
            self._has_advised = True
            share = min(1.0, self._slow_waited_s / max(self._slow_s, 1e-9))
            advice = data_advice(
                context.config.data.workers,
                max(1, int(usable_cpus() // job.ddp.local_world_size)),
                share,
                is_stream=not isinstance(job.loader, IndexedLoader),
            )
            context.note(
                f"rank 0 on {job.ddp.host} waited for data {share:.0%} of the last {duration(self._slow_s)}; "
                f"it has {advice}"
            )

    def _counts(self, context: RunContext) -> RankCounts:
        job = context.job
        compilations = job.ddp.connection.compilations
        compiled_at = [] if compilations is None else list(compilations.began_at.values())
        measured = self._communication.newest(context.progress.step)
        return RankCounts(
            num_compiled=len(compiled_at),
            num_compiled_later=sum(step > self._first_step for step in compiled_at),
            tokens=job.loader.num_tokens,
            waited_s=job.loader.waited_s,
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


def data_advice(workers: int, cores: int, share: float, *, is_stream: bool) -> str:
    """What to try, after what was measured."""
    # As many as make a batch in the time of a step. Without workers, the loop makes batches while it
    # waits. Workers of a stream do not divide it.
    needed = math.ceil((workers or share) / max(1 - share, 0.01))
    num_workers = min(needed, 1 if is_stream else max(1, cores - 1))
    remedies = []
    if num_workers >= MIN_GAIN * workers:
        remedies.append(f"--data.workers {num_workers}")
    remedies += [
        "--data.resident, if the dataset fits into the GPU's memory",
        'docs/data.md, "Your own dataset, fast"; drumline profile measures what a batch costs',
    ]
    return as_list(f"{plural(workers, 'worker')} and {plural(cores, 'core')}; try:", remedies)
