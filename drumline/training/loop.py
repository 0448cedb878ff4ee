"""The training loop: set the learning rate, take the step, then run the actions that are due; and the
actions that log, evaluate and compare."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import NamedTuple

import torch

from drumline.base.errors import as_list
from drumline.base.processes import usable_cpus
from drumline.base.text import duration, plural
from drumline.data.loader import IndexedLoader, Step
from drumline.data.sharding import Ledger
from drumline.metrics.meters import means
from drumline.parallel.replicas import ReplicaComparison
from drumline.rank.collectives import all_sum, collective_counter
from drumline.training.between_steps.non_finite import NonFinite
from drumline.training.between_steps.preemption import Preempt, Preemption
from drumline.training.between_steps.saver import Saver
from drumline.training.between_steps.throughput import DdpStepTimes, ExposedCommunication, Speed
from drumline.training.between_steps.trace import TracedStep
from drumline.training.job.evaluation_job import evaluate, numbers
from drumline.training.output import WatchNotices
from drumline.training.run_context import AT_EPOCH_END, Action, Periodic, RunContext, SimpleAction
from drumline.training.steps.compilation import report_recompilations
from drumline.training.steps.eager import AnyStep
from drumline.training.tasks.base import Task
from drumline.training.tasks.hook import Hook
from drumline.watch.heartbeat import DATA, Phase

MIN_SHARE = 0.2
MIN_S = 10.0
# of the device when the loop asks for the loss; with more, it was not idle
MAX_STEPS_LEFT = 1.5
MIN_GAIN = 1.25  # as many workers


# The log line: the loss and the speed since the last one, and what to do about a run that waits for
# data


class RankCounts(NamedTuple):
    """A rank's part of what is counted; the ranks sum it with each log line."""

    num_compiled: float
    """Compilations since the last log line."""

    num_compiled_later: float
    """Of these, those after the first step."""

    num_votes: float
    """1: a hook has asked to end the run."""

    tokens: float
    waited_s: float
    """Summed: the mean over all ranks, as the following two."""

    exposed_s: float
    computing_s: float
    """`DdpStepTimes`."""


class LogSums(NamedTuple):
    """What is summed over all ranks for a log line."""

    ranks: RankCounts
    """The counts of all ranks, summed."""

    measured: list[float]
    """As `Meter.take` returns it."""

    num_bad: float
    """Steps that were not finite."""

    blocked_s: float
    """How long this rank waited for the sums, and so for its device."""


class LogTraining(Periodic):
    """Every `log.every_steps` steps: the loss since the last line."""

    name = "log"

    def __init__(self, context: RunContext, non_finite: NonFinite, notices: WatchNotices) -> None:
        super().__init__(
            context.progress, every_steps=context.config.log.every_steps, every_epochs=0
        )

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

    def run(self, context: RunContext) -> None:
        """Collective: report the mean loss, the speed and the phases since the last line."""
        job = context.job
        step = context.progress.step
        sums = self._reduce(context)
        self._non_finite.act_on(sums.num_bad)  # before the task's report() gets a NaN
        numbers = job.reported(means(sums.measured, job.meter.names))

        if job.finite.grad_norm is not None:
            numbers["grad_norm"] = float(job.finite.grad_norm)

        ranks = sums.ranks
        speed = context.throughput.lap(
            waited_s=ranks.waited_s,
            tokens=ranks.tokens,
            measured=DdpStepTimes(ranks.exposed_s, ranks.computing_s),
            has_compiled=ranks.num_compiled_later > 0,
        )

        self._report_phases(context)
        context.reporter.report(
            "train",
            step=step,
            epoch=context.progress.epoch,
            lr=job.rates.highest(),
            **asdict(speed),
            seconds_left=context.throughput.seconds_for(context.total_steps - step),
            **numbers,
        )

        self._notices.report(context.reporter)
        self._advise(context, speed, sums.blocked_s)
        if ranks.num_compiled:
            report_recompilations(context, self._first_step)

        context.end_if(ranks.num_votes)

    def _reduce(self, context: RunContext) -> LogSums:
        """Collective: one reduction for all that a log line needs."""
        job = context.job
        counts = job.finite.counts
        this_rank = self._counts(context)

        # Filled on the device: a copy from the host would wait for it, before the time is taken.
        counted = [counts.new_full((1,), number) for number in this_rank]
        counted += [job.meter.take(), counts]

        began = time.perf_counter()
        reduced = all_sum(torch.cat(counted)).tolist()
        blocked_s = time.perf_counter() - began

        *measured, num_bad, _ = reduced[len(this_rank) :]
        if num_bad and not measured[1]:  # all were skipped
            measured = [math.nan, 1.0, *[math.nan] * len(job.meter.names)]

        ranks = RankCounts(*reduced[: len(this_rank)])
        return LogSums(ranks, measured, num_bad, blocked_s)

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
            share = min(1.0, self._slow_waited_s / self._slow_s)
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
        """What this rank has counted for the log line."""
        job = context.job
        compilations = job.ddp.connection.compilations
        compiled_at = [] if compilations is None else list(compilations.began_at.values())

        measured = self._communication.newest(context.progress.step)
        world_size = job.ddp.world_size

        return RankCounts(
            num_compiled=len(compiled_at),
            num_compiled_later=sum(step > self._first_step for step in compiled_at),
            num_votes=context.hooks.vote(),
            tokens=job.loader.num_tokens,
            waited_s=job.loader.waited_s / world_size,
            exposed_s=measured.exposed_s / world_size,
            computing_s=measured.computing_s / world_size,
        )

    def _report_phases(self, context: RunContext) -> None:
        """What this rank's time went to since the last line; the first line has the start of the
        run, too: `{"data": 0.02, "forward": 1.31, "backward": 2.6, "optimizer": 0.4, ...}`, in
        seconds."""
        before = self._spent_s
        self._spent_s = context.job.heartbeat.spent_s()
        phases_s = {}

        for name, seconds in self._spent_s.items():
            if (spent := seconds - before.get(name, 0.0)) > 0:
                phases_s[name] = round(spent, 6)

        context.reporter.report("phases", step=context.progress.step, phases_s=phases_s)


def data_advice(workers: int, cores: int, share: float, *, is_stream: bool) -> str:
    """What to try, after what was measured: more workers, if there are cores for them, and what
    needs none."""
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


# Evaluations, and replicas


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
        """A run that has already taken its last step is evaluated now."""
        if not context.job.eval_loaders:
            self._check_best_metric(context)
        elif context.progress.step >= context.total_steps:
            self.run(context)

    def run(self, context: RunContext) -> None:
        """Collective: evaluate with the weights that all ranks share."""
        if context.job.eval_loaders:
            with context.job.shared_weights():
                self._run(context)

    def _run(self, context: RunContext) -> None:
        """Collective: evaluate all sets, report, and let the hooks end the run."""
        if self._trace is not None:
            self._trace.write("evaluation")

        with context.throughput.paused("evaluation"):
            context.hooks.call("before_evaluation")
            started = time.perf_counter()
            metrics = evaluate(context.job)

        context.progress.metrics = metrics
        context.progress.evaluated_step = context.progress.step
        if self._trace is not None:
            self._trace.write("evaluated", metrics=metrics)

        context.reporter.report(
            "evaluation",
            step=context.progress.step,
            epoch=context.progress.epoch,
            samples=context.job.eval_samples,
            seconds=time.perf_counter() - started,
            **metrics,
        )

        self._check_best_metric(context)
        if context.hooks.hooks:
            with context.throughput.paused("evaluation"):
                context.hooks.call("after_evaluation")
                vote = context.job.finite.counts.new_full((), context.hooks.vote())
                context.end_if(all_sum(vote).item())

    def _check_best_metric(self, context: RunContext) -> None:
        """Once, on rank 0: at the first evaluation of this start, or at the start if there is no
        evaluation."""
        if self._is_best_metric_checked:
            return

        self._is_best_metric_checked = True
        task = context.job.task
        reported = numbers(context.progress.metrics)

        is_expected = bool(context.job.eval_loaders) or task.best_metric != Task.best_metric
        if is_expected and task.best_metric not in reported:
            context.warn(
                f"{type(task).__name__}.best_metric is {task.best_metric!r}, so no checkpoint is kept as the best: "
                f"evaluations report {', '.join(reported) or 'nothing (there is no eval_data())'}"
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

        self._is_on = config.watch.replicas_every > 0 and job.ddp.world_size > 1
        self.interval = config.watch.replicas_every or AT_EPOCH_END

        # what they share changes in rounds only
        if job.sync is not None and self._is_on:
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
        """The ranks must begin with the same weights."""
        self.run(context)

    def due(self, step: int) -> bool:
        """At its interval, and before each save: a checkpoint is what all ranks have."""
        return step % self.interval == 0 or self._saver.due(step)

    def run(self, context: RunContext) -> None:
        """Collective: raise if the ranks differ, or copy the majority's tensors to all."""
        self._non_finite.check()
        if self._is_on:
            self._replicas.check(context.progress.step)


# What runs between steps, and the loop


def after_step(hook: Hook) -> Action:
    """A hook's `after_step`."""
    every = hook.every_steps
    return SimpleAction(
        f"{type(hook).__name__}.after_step",
        due=lambda step: step % every == 0,
        run=lambda context: context.hooks.call("after_step", hook),
        interval=every,
    )


def between_steps(
    context: RunContext,
    non_finite: NonFinite,
    saver: Saver,
    preemption: Preemption,
    *,
    notices: WatchNotices,
    trace: TracedStep | None = None,
    balance: Action | None = None,
) -> list[Action]:
    """The actions of a run after its first step, in the order in which they run, which is part of
    their correctness."""
    evaluate = Evaluate(context, trace)
    compare = CompareReplicas(context, non_finite, saver)
    return [
        # The task's hooks, in its order. Before the log line, with which ranks agree to stop if a
        # hook asked for it.
        *map(after_step, context.hooks.defining("after_step")),
        # Before replicas are compared: it finds a NaN, and `--train.on_nan stop` freezes the
        # weights of the one rank whose loss was not finite, which would look like replicas that
        # differ.
        LogTraining(context, non_finite, notices),
        # Before the evaluation, which broadcasts rank 0's buffers, and would hide a difference in
        # them.
        compare,
        # Before the save, so that a resumed run never skips an evaluation, and the checkpoint has
        # its metrics.
        evaluate,
        # Again, if an evaluation, which may take long, ran between the comparison and the save.
        SimpleAction(
            "compare_replicas_again",
            due=lambda step: evaluate.due(step) and saver.due(step),
            run=compare.run,
            interval=AT_EPOCH_END,
        ),
        # Before the save, which records how the next step is split.
        *([] if balance is None else [balance]),
        saver,
        # Not collective: when the writer's thread has finished, report the checkpoint or raise its
        # error.
        SimpleAction(
            "report_save",
            lambda step: saver.writer.has_news,
            lambda context: saver.report(),
            interval=0,
        ),
        # Last, so that its save contains everything of this step, and the step is not saved twice.
        Preempt(preemption, saver, compare, non_finite),
    ]


class Loop:
    """Runs a job from its current progress to its last step."""

    def __init__(
        self, context: RunContext, train_step: AnyStep, ledger: Ledger, between: list[Action]
    ) -> None:
        self.progress = context.progress
        self._context = context
        self.job = context.job
        self._rates = context.job.rates
        self._total_steps = context.total_steps
        self._throughput = context.throughput

        self._train_step = train_step
        self._ledger = ledger
        self._actions = between

        self._all = [(action.due, action.run) for action in between]
        self._each_step = [(action.due, action.run) for action in between if not action.interval]
        self._intervals = [action.interval for action in between if action.interval]

        self._ask_all_at = 0
        self._heartbeat = context.job.heartbeat
        self._num_collectives = collective_counter()

    def run(self) -> None:
        """Collective: train to the last step, or until an action ends the run."""
        for action in self._actions:
            action.start(self._context)

        self._begin_step()
        self._throughput.start()
        while not self._is_over():
            for step in self.job.loader.steps():
                self.take_step(step)
                self.run_actions()
                if self._is_over():
                    break

        self._throughput.stop()

    def take_step(self, step: Step) -> None:
        """Collective: one optimizer step, and its ledger entry. Only this and `run_actions` run in
        every step."""
        progress = self.progress
        self._rates.set(progress.step, self._total_steps)
        self._train_step(step)

        progress.step += 1
        progress.cursor = step.plan.next_cursor
        self._ledger.add(step.plan)
        self._throughput.count(step.plan.global_size)
        self._begin_step()

    def run_actions(self) -> None:
        """Collective: run the actions that are due after this step."""
        step = self.progress.step
        has_run = False
        calls = self._each_step

        if step >= self._ask_all_at or self.progress.cursor.position == 0:
            calls = self._all
            following = (step + interval - step % interval for interval in self._intervals)
            self._ask_all_at = min([self._total_steps, *following])

        for due, run in calls:
            if due(step):
                self._heartbeat.mark(Phase.BETWEEN)
                run(self._context)
                has_run = True

        if has_run:
            self._heartbeat.mark(DATA)

    def _begin_step(self) -> None:
        """Mark the heartbeat of the next step, which begins with its data."""
        self._heartbeat.count_collectives(self._num_collectives())
        self._heartbeat.begin_step(self.progress.step)
        self._heartbeat.mark(DATA)

    def _is_over(self) -> bool:
        return self.progress.step >= self.progress.last_step or self.progress.is_stopping
