"""What happens between steps, as hooks: each has a name, `due` (when to run) and `run`.

Every rank has the same hooks and runs them in the same order, which `loop.between_steps` sets.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from drumline.data.evaluation_loader import EvaluationLoader
from drumline.distributed.collectives import all_sum, broadcast_json
from drumline.distributed.wrap import LiveBuffers
from drumline.engine.job import Job
from drumline.engine.non_finite import NonFinite
from drumline.engine.output import WatchNotices
from drumline.engine.preemption import Preemption
from drumline.engine.run_context import RunContext
from drumline.engine.saver import Saver
from drumline.engine.steps.eager import AnyStep
from drumline.engine.trace import TracedStep
from drumline.errors import TrainingError
from drumline.metrics.meters import means
from drumline.tasks.base import Task
from drumline.watch.heartbeat import Phase
from drumline.watch.replicas import ReplicaComparison

AT_EPOCH_END = sys.maxsize


class Hook:
    """Something that happens between steps, on every rank."""

    name = ""
    interval = 1
    """After how many steps `due` is called; it is also called after the first step, at the end of each epoch and after
    the last step. 0: after every step, for a hook that a thread or a signal triggers."""

    def start(self, context: RunContext) -> None:
        """Collective: before the first step."""

    def due(self, step: int) -> bool:
        """Whether to run after this step: the same on every rank where `run` is collective."""
        raise NotImplementedError

    def run(self, context: RunContext) -> None:
        """Collective, unless the hook says otherwise."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The hook's state in a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The state of the checkpoint that the run resumes from."""


class FirstStep(Hook):
    """Once, after the first step of this start has finished on the device."""

    name, interval = "first_step", AT_EPOCH_END

    def __init__(self, action: Callable[[], None]) -> None:
        self._action, self._is_due = action, True

    def due(self, step: int) -> bool:
        return self._is_due

    def run(self, context: RunContext) -> None:
        self._is_due = False
        if context.job.ddp.device.type == "cuda":
            torch.cuda.synchronize(context.job.ddp.device)
        self._action()


class LogTraining(Hook):
    """Every `log.every_steps` steps: the loss since the last line."""

    name = "log"

    def __init__(self, context: RunContext, train_step: AnyStep, non_finite: NonFinite, notices: WatchNotices) -> None:
        self.interval, self._last = context.config.log.every_steps, context.total_steps
        self._train_step, self._non_finite, self._notices = train_step, non_finite, notices

    def due(self, step: int) -> bool:
        return step % self.interval == 0 or step >= self._last

    def run(self, context: RunContext) -> None:
        job, throughput, step = context.job, context.throughput, context.progress.step
        *sums, num_bad, _ = all_sum(torch.cat([job.meter.take(), job.finite.counts])).tolist()
        if num_bad and not sums[1]:  # all were skipped
            sums = [math.nan, 1.0, *[math.nan] * len(job.meter.names)]
        self._non_finite.act_on(num_bad)  # before the task's report() gets a NaN
        numbers = job.reported(means(sums, job.meter.names))
        if self._train_step.grad_norm is not None:
            numbers["grad_norm"] = float(self._train_step.grad_norm)
        samples_per_s, data_share = throughput.lap(job.loader.waited_s)
        context.reporter.report(
            "train",
            step=step,
            epoch=context.epoch,
            lr=float(job.optimizer.param_groups[0]["lr"]),
            samples_per_s=samples_per_s,
            data_share=data_share,
            seconds_left=throughput.seconds_for(context.total_steps - step),
            **numbers,
        )
        self._notices.report(context.reporter)


class Evaluate(Hook):
    """After every `train.eval_every_epochs` epochs, and at the end."""

    name, interval = "evaluate", AT_EPOCH_END

    def __init__(self, context: RunContext, trace: TracedStep | None) -> None:
        self._progress, self._last = context.progress, context.total_steps
        self._every_epochs = context.config.train.eval_every_epochs or sys.maxsize
        self._trace = trace
        self._is_best_metric_checked = not context.job.ddp.is_main_process()

    def start(self, context: RunContext) -> None:
        if context.job.eval_loader is None:
            self._check_best_metric(context)
        elif context.progress.step >= context.total_steps:
            self.run(context)

    def due(self, step: int) -> bool:
        cursor = self._progress.cursor
        return (cursor.position == 0 and cursor.epoch % self._every_epochs == 0) or step >= self._last

    def run(self, context: RunContext) -> None:
        if (loader := context.job.eval_loader) is None:
            return
        if self._trace is not None:
            self._trace.write("evaluation")
        started = time.perf_counter()
        with context.throughput.paused():
            metrics = evaluate(context.job, loader)
        context.metrics.clear()
        context.metrics.update(metrics)
        if self._trace is not None:
            self._trace.write("evaluated", metrics=metrics)
        context.reporter.report(
            "evaluation",
            step=context.progress.step,
            epoch=context.epoch,
            samples=loader.num_samples,
            seconds=time.perf_counter() - started,
            **metrics,
        )
        self._check_best_metric(context)

    def _check_best_metric(self, context: RunContext) -> None:
        """Once, on rank 0: at the first evaluation of this start, or at the start if there is no evaluation."""
        if self._is_best_metric_checked:
            return
        self._is_best_metric_checked = True
        task, has_data = context.job.task, context.job.eval_loader is not None
        what = f"{type(task).__name__}.best_metric is {task.best_metric!r}"
        if not has_data and task.best_metric != Task.best_metric:
            context.warn(f"{what}, but there is no eval_data(), so no checkpoint is kept as the best")
        elif has_data and task.best_metric not in context.metrics:
            context.warn(
                f"{what}, which the evaluation does not report, so no checkpoint is kept as the best; it reports "
                f"{', '.join(context.metrics)}"
            )


class Save(Hook):
    """Every `checkpoint.every_steps` and `checkpoint.every_epochs`, and at the end."""

    name = "save"

    def __init__(self, context: RunContext, saver: Saver, evaluation: Evaluate) -> None:
        settings = context.config.checkpoint
        self._progress, self._last = context.progress, context.total_steps
        self.interval = settings.every_steps or AT_EPOCH_END
        self._every_epochs = settings.every_epochs or sys.maxsize
        self._saver, self._evaluation = saver, evaluation
        self.saved_step = context.progress.step
        """The latest step that is saved, or being saved."""

    def due(self, step: int) -> bool:
        cursor = self._progress.cursor
        return (
            step % self.interval == 0
            or (cursor.position == 0 and cursor.epoch % self._every_epochs == 0)
            or step >= self._last
        )

    def run(self, context: RunContext) -> None:
        step = context.progress.step
        metrics = dict(context.metrics) if self._evaluation.due(step) else {}
        self.save(context, metrics, must_save=step >= context.total_steps)

    def save(self, context: RunContext, metrics: Mapping[str, float], *, must_save: bool) -> None:
        """Collective."""
        step = context.progress.step
        context.job.ddp.heartbeat.mark(Phase.SAVE)
        with context.throughput.paused():
            if self._saver.prepare(step, metrics, must_save=must_save):
                self._saver.save(context.progress, metrics)
                self.saved_step = step


class CompareReplicas(Hook):
    """Every `watch.replicas_every` steps, and before each save: check that all ranks have the same bits."""

    name = "compare_replicas"

    def __init__(self, context: RunContext, non_finite: NonFinite, save: Save) -> None:
        job, config = context.job, context.config
        self._non_finite, self._save = non_finite, save
        self._is_on = config.watch.replicas_every > 0
        self.interval = config.watch.replicas_every or AT_EPOCH_END
        self._replicas = ReplicaComparison(
            job.model,
            job.optimizer,
            host=job.ddp.host,
            device=job.ddp.device,
            on_difference=config.watch.on_difference,
            include_buffers=config.dist.broadcast_buffers,
        )

    def start(self, context: RunContext) -> None:
        self.run(context)

    def due(self, step: int) -> bool:
        return step % self.interval == 0 or self._save.due(step)

    def run(self, context: RunContext) -> None:
        self._non_finite.check()
        if self._is_on:
            self._replicas.check(context.progress.step)


class CompareAfterEvaluation(Hook):
    """Compares again if an evaluation, which may take long, ran between the comparison and the save."""

    name, interval = "compare_replicas_again", AT_EPOCH_END

    def __init__(self, comparison: CompareReplicas, evaluation: Evaluate, save: Save) -> None:
        self._comparison, self._evaluation, self._save = comparison, evaluation, save

    def due(self, step: int) -> bool:
        return self._evaluation.due(step) and self._save.due(step)

    def run(self, context: RunContext) -> None:
        self._comparison.run(context)


class ReportSave(Hook):
    """Not collective: when the writer's thread has finished, report the checkpoint or raise its error."""

    name, interval = "report_save", 0

    def __init__(self, saver: Saver) -> None:
        self._saver, self._writer = saver, saver.writer

    def due(self, step: int) -> bool:
        return self._writer.has_news

    def run(self, context: RunContext) -> None:
        self._saver.report()


class Preempt(Hook):
    """When any rank has received a signal or a notice: at the step that all agree on, save and end the run."""

    name, interval = "preempt", 0

    def __init__(self, preemption: Preemption, save: Save, comparison: CompareReplicas, non_finite: NonFinite) -> None:
        self._preemption, self._save = preemption, save
        self._comparison, self._non_finite = comparison, non_finite

    def start(self, context: RunContext) -> None:
        self._preemption.begin()
        self.run(context)

    def due(self, step: int) -> bool:
        return self._preemption.is_asked

    def run(self, context: RunContext) -> None:
        step = context.progress.step
        # At its last step the run ends as usual.
        if step >= context.total_steps or not self._preemption.stops_at(step):
            return
        context.progress.is_stopping = True
        if self._save.saved_step != step:
            self._non_finite.read()  # also reports updates that were skipped since the last log line
            self._comparison.run(context)
            self._save.save(context, {}, must_save=True)


@torch.no_grad()
def evaluate(job: Job, loader: EvaluationLoader) -> dict[str, float]:
    """Collective: the mean loss and metrics of the model, as it is now, over every sample of `loader`.

    The same numbers on any number of ranks: a batch holds the same samples whatever the world size, every batch is
    summed by one rank, and the sums are added with exact rounding, in any order."""
    model, device = job.model, job.ddp.device
    job.ddp.heartbeat.mark(Phase.EVALUATION)
    LiveBuffers(model).broadcast()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    names, sums = _sum_batches(job, loader)
    for module, was_training in modes:  # a user may keep parts of the model in eval mode
        module.training = was_training
    # Rank 0 always has the first batch; a rank without a batch gets the names from it.
    mine = [loader.num_batches, loader.digest]
    names, expected = broadcast_json([names, mine], device=device)
    if mine != expected:  # only for a stream: other datasets were compared before the first step
        what = "an evaluation stream whose first sample differs from that of rank 0"
        if mine[0] != expected[0]:
            what = f"{mine[0]} evaluation batches from its stream, rank 0 {expected[0]}"
        raise TrainingError(
            f"rank {job.ddp.rank} read {what}",
            next_step="let every rank read the whole evaluation stream in one order: Drumline splits it by batches",
        )
    table = torch.zeros(expected[0], 1 + len(names), dtype=torch.float64, device=device)
    for number, row in sums.items():
        table[number] = row
    weight, *totals = (math.fsum(column) for column in all_sum(table).cpu().T.tolist())
    if weight <= 0:
        raise TrainingError("the weights of the evaluation set add up to 0, so it has no mean loss")
    return job.reported({name: total / weight for name, total in zip(names, totals, strict=True)})


def _sum_batches(job: Job, loader: EvaluationLoader) -> tuple[list[str], dict[int, Tensor]]:
    """The names of the metrics, and for each batch number a row: weight, loss, metrics."""
    names: list[str] = []
    sums = {}
    for number, size, data in loader.numbered():
        job.ddp.heartbeat.mark(Phase.EVALUATION)  # so that a long evaluation shows progress
        with job.autocast:
            loss = job.task.loss(job.model, data)
        names = ["loss", *loss.metrics]
        row = [size if loss.weight is None else loss.weight, loss.total, *loss.metrics.values()]
        sums[number] = torch.stack([torch.as_tensor(value, device=job.ddp.device).double() for value in row])
    return names, sums
