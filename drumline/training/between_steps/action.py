"""An action between steps: it has a name, `due` (when to run) and `run`.

Every rank has the same actions and runs them in the same order, which `loop.between_steps` sets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from drumline.training.job.job import Progress
from drumline.training.run_context import RunContext

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
