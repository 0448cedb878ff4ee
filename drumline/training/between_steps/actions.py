"""What happens between steps, but for the save (`saver`) and the stop (`preemption`).

An action has a name, `due` (when to run) and `run`. Every rank has the same actions and runs them
in the same order, which `loop.between_steps` sets.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import torch

from drumline.metrics.meters import means
from drumline.parallel.replicas import ReplicaComparison
from drumline.rank.collectives import all_sum
from drumline.training.between_steps.data_advice import DataAdvice
from drumline.training.between_steps.evaluation import evaluate, numbers
from drumline.training.between_steps.non_finite import NonFinite
from drumline.training.between_steps.throughput import DdpStepTimes, ExposedCommunication, Speed
from drumline.training.between_steps.trace import TracedStep
from drumline.training.job.job import Progress
from drumline.training.output import WatchNotices
from drumline.training.run_context import RunContext
from drumline.training.steps.compilation import report_recompilations
from drumline.training.steps.eager import AnyStep
from drumline.training.tasks.base import Task
from drumline.training.tasks.hook import Hook

AT_EPOCH_END = sys.maxsize


class Action:
    """Something that happens between steps, on every rank."""

    name = ""
    interval = 1
    """After how many steps `due` is called; it is also called after the first step, at the end of
    each epoch and after the last step. 0: after every step, for an action that a thread or a signal
    triggers."""

    def start(self, context: RunContext) -> None:
        """Collective: before the first step."""

    def due(self, step: int) -> bool:
        """Whether to run after this step: the same on every rank where `run` is collective."""
        raise NotImplementedError

    def run(self, context: RunContext) -> None:
        """Collective, unless its docstring differs."""
        raise NotImplementedError


class SimpleAction(Action):
    """An action that needs nothing but these functions."""

    def __init__(
        self,
        name: str,
        due: Callable[[int], bool],
        run: Callable[[RunContext], None],
        *,
        interval: int,
    ) -> None:
        self.name = name
        self.interval = interval
        self._due = due
        self._run = run

    def due(self, step: int) -> bool:
        return self._due(step)

    def run(self, context: RunContext) -> None:
        self._run(context)


class Periodic(Action):
    """Due after every so many steps and epochs (0: never), and after the last step."""

    def __init__(self, progress: Progress, *, every_steps: int, every_epochs: int) -> None:
        self._progress = progress
        self.interval = every_steps or AT_EPOCH_END
        self._every_epochs = every_epochs or sys.maxsize

    def due(self, step: int) -> bool:
        cursor = self._progress.cursor
        return (
            step % self.interval == 0
            or (cursor.position == 0 and cursor.epoch % self._every_epochs == 0)
            or step >= self._progress.last_step
        )


class FirstStep(Action):
    """Once, after the first step of this start has finished on the device."""

    name = "first_step"
    interval = AT_EPOCH_END

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._is_due = True

    def due(self, step: int) -> bool:
        return self._is_due

    def run(self, context: RunContext) -> None:
        self._is_due = False
        if context.job.ddp.device.type == "cuda":
            torch.cuda.synchronize(context.job.ddp.device)
        self._callback()


def after_step(hook: Hook) -> Action:
    """A hook's `after_step`."""
    every = hook.every_steps
    return SimpleAction(
        f"{type(hook).__name__}.after_step",
        due=lambda step: step % every == 0,
        run=lambda context: context.call_hooks("after_step", hook),
        interval=every,
    )


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

    def __init__(
        self, context: RunContext, train_step: AnyStep, non_finite: NonFinite, notices: WatchNotices
    ) -> None:
        self.interval = context.config.log.every_steps
        self._progress = context.progress
        self._first_step = context.progress.step
        self._train_step = train_step
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
        if self._train_step.grad_norm is not None:
            numbers["grad_norm"] = float(self._train_step.grad_norm)
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


class Evaluate(Periodic):
    """Every `train.eval_every_epochs` and `train.eval_every_steps`, and at the end."""

    name = "evaluate"

    def __init__(self, context: RunContext, trace: TracedStep | None) -> None:
        train = context.config.train
        super().__init__(
            context.progress,
            every_steps=train.eval_every_steps,
            every_epochs=train.eval_every_epochs,
        )
        self._trace = trace
        self._is_best_metric_checked = not context.job.ddp.is_main_process()

    def start(self, context: RunContext) -> None:
        if not context.job.eval_loaders:
            self._check_best_metric(context)
        elif context.progress.step >= context.total_steps:
            self.run(context)

    def run(self, context: RunContext) -> None:
        if context.job.eval_loaders:
            with context.job.shared_weights():
                self._run(context)

    def _run(self, context: RunContext) -> None:
        if self._trace is not None:
            self._trace.write("evaluation")
        with context.throughput.paused("evaluation"):
            context.call_hooks("before_evaluation")
            started = time.perf_counter()
            metrics = evaluate(context.job)
        context.progress.metrics = metrics
        if self._trace is not None:
            self._trace.write("evaluated", metrics=metrics)
        context.reporter.report(
            "evaluation",
            step=context.progress.step,
            epoch=context.epoch,
            samples=context.job.eval_samples,
            seconds=time.perf_counter() - started,
            **metrics,
        )
        self._check_best_metric(context)
        if context.hooks is not None:
            with context.throughput.paused("evaluation"):
                context.call_hooks("after_evaluation")
                context.end_if(all_sum(context.hooks.vote(context.job.finite.counts)).item())

    def _check_best_metric(self, context: RunContext) -> None:
        """Once, on rank 0: at the first evaluation of this start, or at the start if there is no
        evaluation."""
        if self._is_best_metric_checked:
            return
        self._is_best_metric_checked = True
        task = context.job.task
        has_data = bool(context.job.eval_loaders)
        what = f"{type(task).__name__}.best_metric is {task.best_metric!r}"
        if not has_data and task.best_metric != Task.best_metric:
            context.warn(
                f"{what}, but there is no eval_data(), so no checkpoint is kept as the best"
            )
        elif has_data and task.best_metric not in (reported := numbers(context.metrics)):
            context.warn(
                f"{what}, which the evaluation does not report, so no checkpoint is kept as the best; it reports "
                f"{', '.join(reported)}"
            )


class CompareReplicas(Action):
    """Every `watch.replicas_every` steps, and before each save: check that all ranks have the same
    bits. With `--dist.sync` only in rounds: what replicas share."""

    name = "compare_replicas"

    def __init__(self, context: RunContext, non_finite: NonFinite, saver: Periodic) -> None:
        job = context.job
        config = context.config
        self._non_finite = non_finite
        self._saver = saver
        self._is_on = config.watch.replicas_every > 0
        self.interval = config.watch.replicas_every or AT_EPOCH_END
        if job.sync is not None and self._is_on:  # what they share changes in rounds only
            self.interval = -(-self.interval // job.sync.plan.every) * job.sync.plan.every
        self._replicas = ReplicaComparison(
            job.model,
            job.optimizer,
            host=job.ddp.host,
            device=job.ddp.device,
            on_difference=config.watch.on_difference,
            include_buffers=config.dist.broadcast_buffers,
            tensors=None if job.sync is None else job.sync.replica_tensors,
            sharded=job.sharded,
        )

    def start(self, context: RunContext) -> None:
        self.run(context)

    def due(self, step: int) -> bool:
        return step % self.interval == 0 or self._saver.due(step)

    def run(self, context: RunContext) -> None:
        self._non_finite.check()
        if self._is_on:
            self._replicas.check(context.progress.step)
