"""The training loop: steps, and what is due between them: a log line, an evaluation, a checkpoint.

At the end of an epoch evaluation comes before the save, so a resumed run never skips one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drumline.config.schema import Config
from drumline.data.ledger import Ledger
from drumline.data.steps import Step
from drumline.distributed.collectives import all_sum
from drumline.distributed.group import collective_counter
from drumline.engine.evaluate import evaluate
from drumline.engine.job import Job
from drumline.engine.ledger_file import LedgerFile
from drumline.engine.non_finite import NonFinite
from drumline.engine.notices import WatchNotices
from drumline.engine.optimizer import rate_of, set_rate
from drumline.engine.pace import Pace
from drumline.engine.preemption import Preemption
from drumline.engine.recovery import Fault
from drumline.engine.saver import Saver
from drumline.engine.saving import Progress
from drumline.engine.schedule import rate_factor
from drumline.engine.start_clock import StartClock
from drumline.engine.steps.choice import make_step
from drumline.engine.steps.kind import AnyStep
from drumline.engine.trace import Trace, TracedStep
from drumline.metrics.events import Reporter
from drumline.metrics.meters import means
from drumline.tasks.base import Task
from drumline.watch.beats.phase import DATA, Phase
from drumline.watch.replicas import ReplicaComparison


@dataclass
class Loop:
    """Runs a job from where its progress stands to its last step."""

    job: Job
    config: Config
    progress: Progress
    reporter: Reporter
    checkpoints: Path
    facts: dict[str, Any]
    total_steps: int
    ledger_file: LedgerFile | None = None
    ledger: Ledger = field(default_factory=Ledger)
    trace: Trace | None = None
    preemption: Preemption = field(default_factory=Preemption)
    fault: Fault | None = None
    """What this run goes on after; until its first step, and on rank 0."""
    clock: StartClock | None = None
    """How long it is since the command; until the first step."""
    keep_settings: Callable[[], None] | None = None
    """Called after the first step: from then on the run was trained with these settings."""
    is_preempted: bool = False
    pace: Pace = field(default_factory=Pace)
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the latest evaluation."""

    def __post_init__(self) -> None:
        is_speaker = self.job.ddp.is_main_process()
        self.notices = WatchNotices(self.job.ddp.watch_folder if is_speaker else None)
        self._replicas = ReplicaComparison(
            self.job.model,
            self.job.optimizer,
            host=self.job.ddp.host,
            device=self.job.ddp.device,
            on_difference=self.config.watch.on_difference,
            include_buffers=self.config.dist.broadcast_buffers,
        )
        self._non_finite = NonFinite(
            self.job, self.progress, on_nan=self.config.train.on_nan, reporter=self.reporter
        )
        self.saver = Saver(
            self.job,
            root=self.checkpoints,
            settings=self.config.checkpoint,
            facts=self.facts,
            reporter=self.reporter,
            ledger_file=self.ledger_file,
            check_state=self._non_finite.check_state,
        )
        self._saved_step = self.progress.step
        self._is_best_metric_checked = False
        self._beat = self.job.ddp.beat
        self._num_collectives = collective_counter()

    def run(self) -> None:
        """Collective: train to the end, or until the run is told to leave."""
        job, progress, writer = self.job, self.progress, self.saver.writer
        train_step = self._traced(self._make_step())
        if job.eval_loader is None and job.ddp.is_main_process():
            self._check_best_metric()
        if progress.step >= self.total_steps:
            self._evaluate()
        self._compare_replicas()
        self.preemption.begin()
        self._leave_if_told()
        self._begin_step()
        self.pace.start()
        while progress.step < self.total_steps and not self.is_preempted:
            for step in job.loader.steps():
                self.take_step(train_step, step)
                self._between_steps(train_step)
                if writer.has_news:
                    self.saver.take_news()
                if self.preemption.is_asked:
                    self._beat.mark(Phase.BETWEEN)
                    self._leave_if_told()
                    self._beat.mark(DATA)
                if progress.step >= self.total_steps or self.is_preempted:
                    break
        self.pace.stop()
        self.saver.finish()
        self._beat.mark(Phase.LEAVING)

    def take_step(self, train_step: AnyStep, step: Step) -> None:
        """Collective: one optimizer step, and the note that it was taken. This is all that every step pays for."""
        self._set_rate()
        train_step(step)
        self.progress.step += 1
        self.progress.cursor = step.plan.next_cursor
        self.ledger.add(step.plan)
        self.pace.count(step.plan.global_size)
        self._begin_step()

    def _begin_step(self) -> None:
        """The next step begins, with its data; what is due before it marks itself."""
        beat = self._beat
        beat.count_collectives(self._num_collectives())
        beat.begin_step(self.progress.step)
        beat.mark(DATA)

    def _make_step(self) -> AnyStep:
        def tell(sentence: str) -> None:
            self.reporter.report("note", step=self.progress.step, message=sentence)

        def keep(way: str) -> None:
            self.facts["step"] = way

        return make_step(self.job, self.config, chosen=self.facts.get("step"), choose=keep, tell=tell)

    def _traced(self, train_step: AnyStep) -> AnyStep:
        if self.trace is None:
            return train_step
        self.trace.start()
        return TracedStep(train_step, self.trace)

    def _set_rate(self) -> None:
        optim = self.config.optim
        lr = self.job.peak_lr * rate_factor(
            self.progress.step,
            total_steps=self.total_steps,
            schedule=optim.schedule,
            warmup_steps=optim.warmup_steps,
            final_ratio=optim.final_lr_ratio,
            step_every=optim.step_every,
            step_factor=optim.step_factor,
        )
        set_rate(self.job.optimizer, lr)

    def _is_due(self, count: int, every: int) -> bool:
        return self.progress.step >= self.total_steps or (every > 0 and count % every == 0)

    def _log(self, train_step: AnyStep) -> None:
        """Collective. The only place where the loop waits for the device."""
        meter = self.job.meter
        *sums, num_bad, _ = all_sum(torch.cat([meter.take(), self.job.finite.counts])).tolist()
        if num_bad and not sums[1]:  # all were skipped
            sums = [math.nan, 1.0, *[math.nan] * len(meter.names)]
        self._non_finite.act_on(num_bad)  # before the task computes with a NaN in report()
        numbers = self.job.reported(means(sums, meter.names))
        if train_step.grad_norm is not None:
            numbers["grad_norm"] = float(train_step.grad_norm)
        step = self.progress.step
        self.reporter.report(
            "train",
            step=step,
            epoch=self.epoch(),
            lr=rate_of(self.job.optimizer),
            samples_per_s=self.pace.lap(),
            data_share=self.pace.data_share(self.job.loader.waited_s),
            seconds_left=self.pace.seconds_for(self.total_steps - step),
            **numbers,
        )
        self.notices.report(self.reporter)

    def _tell_recovery(self, fault: Fault) -> None:
        step, self.fault = self.progress.step, None
        fault.tell_recovery(self.reporter, resumed_from=step - 1, step=step, device=self.job.ddp.device)

    def _tell_start(self, clock: StartClock) -> None:
        self.clock = None
        clock.tell(self.reporter, step=self.progress.step, device=self.job.ddp.device)

    def _between_steps(self, train_step: AnyStep) -> None:
        cursor, config = self.progress.cursor, self.config
        if self.keep_settings is not None:
            self.keep_settings()
            self.keep_settings = None
        if self.clock is not None:
            self._tell_start(self.clock)
        if self.fault is not None:
            self._tell_recovery(self.fault)
        logs = self._is_due(self.progress.step, config.log.every_steps)
        epoch_ended = cursor.position == 0 or self.progress.step >= self.total_steps
        evaluates = epoch_ended and self._is_due(cursor.epoch, config.train.eval_every_epochs)
        saves = self._is_due(self.progress.step, config.checkpoint.every_steps) or (
            epoch_ended and self._is_due(cursor.epoch, config.checkpoint.every_epochs)
        )
        compares = saves or self._is_due(self.progress.step, config.watch.replicas_every)
        # Before replicas are compared: `--train.on_nan stop` freezes the weights of the rank whose loss is not finite.
        checks = compares and not logs
        if not (logs or compares or evaluates):
            return
        self._beat.mark(Phase.BETWEEN)
        if logs:
            self._log(train_step)
        if checks:
            self._non_finite.check()
        # Before evaluation, which sends rank 0's buffers to all, and with them what may be wrong in them.
        if compares:
            self._compare_replicas()
        if evaluates or saves:
            self.pace.stop()
            fresh_metrics = self._evaluate() if evaluates else {}
            if saves:
                if evaluates:
                    self._beat.mark(Phase.BETWEEN)
                    self._compare_replicas()  # that took a while
                self._save(fresh_metrics)
            self.pace.start()
        self._beat.mark(DATA)

    def _leave_if_told(self) -> None:
        """Collective. A run that is at its end anyway ends as ever."""
        step = self.progress.step
        if step >= self.total_steps or not self.preemption.stops_at(step):
            return
        self.is_preempted = True
        if self._saved_step != step:
            self.pace.stop()
            self._non_finite.read()  # what was skipped since the last log line is reported, too
            self._compare_replicas()
            self._save({}, must_save=True)

    def _compare_replicas(self) -> None:
        """Collective. When it is time, and before each save: a checkpoint is one that all ranks held."""
        if self.config.watch.replicas_every > 0:
            self._replicas.check(self.progress.step)

    def _evaluate(self) -> dict[str, float]:
        """Collective."""
        if (loader := self.job.eval_loader) is None:
            return {}
        if self.trace is not None:
            self.trace.begin_evaluation()
        started = time.perf_counter()
        self.metrics = evaluate(self.job, loader)
        if self.trace is not None:
            self.trace.end_evaluation(self.metrics)
        self.reporter.report(
            "evaluation",
            step=self.progress.step,
            epoch=self.epoch(),
            samples=loader.num_samples,
            seconds=time.perf_counter() - started,
            **self.metrics,
        )
        if not self._is_best_metric_checked and self.job.ddp.is_main_process():
            self._check_best_metric()
        return self.metrics

    def _check_best_metric(self) -> None:
        """Once: at the first evaluation of this start, or at the start where there is none."""
        self._is_best_metric_checked, task = True, self.job.task
        metric = f"{type(task).__name__}.best_metric is {task.best_metric!r}"
        if self.job.eval_loader is not None and task.best_metric not in self.metrics:
            message = (
                f"{metric}, which the evaluation does not report, so no checkpoint is kept as the best; it reports "
                f"{', '.join(self.metrics)}"
            )
            self.reporter.report("warning", message=message)
        elif self.job.eval_loader is None and task.best_metric != Task.best_metric:
            message = f"{metric}, but there is no eval_data(), so no checkpoint is kept as the best"
            self.reporter.report("warning", message=message)

    def _save(self, metrics: Mapping[str, float], *, must_save: bool = False) -> None:
        """Collective. The last save of a run is never left out."""
        self._beat.mark(Phase.SAVE)
        step = self.progress.step
        if not self.saver.make_way(step, metrics, must_save=must_save or step >= self.total_steps):
            return
        # Before the save: a checkpoint never knows of steps that the ledger lacks.
        if self.ledger_file is not None:
            self.ledger_file.hand_in(self.ledger, step=step, device=self.job.ddp.device)
        self.saver.save(self.progress, metrics)
        self._saved_step = step

    def epoch(self) -> int:
        """The epoch of the latest step, counted from 1."""
        cursor = self.progress.cursor
        return max(1, cursor.epoch if cursor.position == 0 else cursor.epoch + 1)
