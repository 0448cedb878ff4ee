"""The context of a run, which everything around its steps gets, and what that is: actions, which
`loop.between_steps` lists."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.checkpoint.retention import Retention
from drumline.config.schema import Config
from drumline.runs.events import Reporter
from drumline.runs.run_folder import RunFolder
from drumline.training.between_steps.task_hooks import TaskHooks
from drumline.training.between_steps.throughput import Throughput
from drumline.training.job.job import Job, Progress, run_length
from drumline.training.tasks.hook import Hook

AT_EPOCH_END = sys.maxsize


@dataclass(frozen=True)
class RunRequest:
    """A task, its settings and folder, and the arguments of the command."""

    task: str
    config: Config
    run: Path
    fresh: bool
    command: tuple[str, ...]


@dataclass(frozen=True)
class RunContext:
    """One object for the whole run; only `progress` and `throughput` change."""

    request: RunRequest
    job: Job
    progress: Progress
    reporter: Reporter
    total_steps: int
    hooks: TaskHooks | None = None
    """None: the task has none."""
    throughput: Throughput = field(default_factory=Throughput)

    def __post_init__(self) -> None:
        self.progress.last_step = self.total_steps

    @property
    def config(self) -> Config:
        return self.request.config

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.request.run)

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the latest evaluation."""
        return self.progress.metrics

    @property
    def epoch(self) -> int:
        """The epoch of the latest step, counted from 1."""
        cursor = self.progress.cursor
        return max(1, cursor.epoch if cursor.position == 0 else cursor.epoch + 1)

    def call_hooks(self, moment: str, only: Hook | None = None) -> None:
        """Call this method of the task's hooks, or of one of them."""
        if self.hooks is not None:
            self.update_hooks(self.hooks).call(moment, only)

    def update_hooks(self, hooks: TaskHooks) -> TaskHooks:
        """The hooks, which know where the run is."""
        hooks.update(step=self.progress.step, epoch=self.epoch, metrics=self.metrics)
        return hooks

    def end_if(self, num_votes: float) -> None:
        """Collective: end the run after this step if `num_votes`, the number of ranks that ask for
        it, is not 0."""
        if self.hooks is None or not num_votes:
            return
        progress = self.progress
        if progress.step < progress.last_step:
            progress.stopped = {
                "reason": self.hooks.pending_reason(),
                **run_length(self.config.train),
            }
            progress.last_step = progress.step
        self.hooks.run.stop_reason = None

    @property
    def retention(self) -> Retention:
        """Which checkpoints are kept."""
        task = self.job.task
        settings = self.config.checkpoint
        return Retention(
            settings.keep_last, settings.keep_best, task.best_metric, task.higher_is_better
        )

    def note(self, message: str) -> None:
        """Log a note."""
        self.reporter.report("note", step=self.progress.step, message=message)

    def warn(self, message: str) -> None:
        self.reporter.report("warning", step=self.progress.step, message=message)


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
