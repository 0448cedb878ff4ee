"""The training loop: set the learning rate, take the step, then run the actions that are due."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.data.ledger import Ledger
from drumline.data.loader import Step
from drumline.rank.group import collective_counter
from drumline.training.between_steps import actions
from drumline.training.between_steps.actions import AT_EPOCH_END, Action, SimpleAction
from drumline.training.between_steps.log_line import LogTraining
from drumline.training.between_steps.non_finite import NonFinite
from drumline.training.between_steps.preemption import Preempt, Preemption
from drumline.training.between_steps.saver import Saver
from drumline.training.between_steps.trace import TracedStep
from drumline.training.output import WatchNotices
from drumline.training.run_context import RunContext
from drumline.training.steps.eager import AnyStep
from drumline.watch.heartbeat import DATA, Phase


@dataclass(frozen=True)
class Safeguards:
    """What protects the steps of a run: against a NaN, a crash and a preemption."""

    non_finite: NonFinite
    saver: Saver
    preemption: Preemption


def between_steps(
    context: RunContext,
    safeguards: Safeguards,
    *,
    first_step: actions.FirstStep,
    notices: WatchNotices,
    trace: TracedStep | None = None,
    balance: Action | None = None,
) -> list[Action]:
    """The actions of a run, in the order in which they run. Their order is part of their
    correctness."""
    non_finite = safeguards.non_finite
    saver = safeguards.saver
    evaluate = actions.Evaluate(context, trace)
    compare = actions.CompareReplicas(context, non_finite, saver)
    hooks = [] if context.hooks is None else context.hooks.defining("after_step")
    return [
        # First, so that the folder has the settings of this step even if a later hook fails.
        first_step,
        # The task's hooks, in its order. Before the log line, with which ranks agree to stop if a
        # hook asked for it.
        *map(actions.after_step, hooks),
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
        Preempt(safeguards.preemption, saver, compare, non_finite),
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
