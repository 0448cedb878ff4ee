"""What happens between steps, but for the log line (`log_line`), the save (`saver`) and the stop
(`preemption`).

An action has a name, `due` (when to run) and `run`. Every rank has the same actions and runs them
in the same order, which `loop.between_steps` sets.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from drumline.parallel.replicas import ReplicaComparison
from drumline.rank.collectives import all_sum
from drumline.training.between_steps.evaluation import evaluate, numbers
from drumline.training.between_steps.non_finite import NonFinite
from drumline.training.between_steps.trace import TracedStep
from drumline.training.job.job import Progress
from drumline.training.run_context import RunContext
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
