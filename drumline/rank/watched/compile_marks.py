"""Marks in a rank's heartbeat when torch compiles: before the first step, or again later, in any
phase."""

from __future__ import annotations

import sys
from typing import Any

from drumline.watch.heartbeat import HeartbeatWriter, Phase

CALLBACKS = "torch._dynamo.callback"
"""The module of torch's compiler that calls back; not loaded where nothing is compiled."""
_OUTSIDE_STEPS = (Phase.START, Phase.BETWEEN, Phase.EVALUATION, Phase.SAVE)


class CompileMarks:
    """Torch calls it when a compilation begins and ends; steps that compile nothing do not."""

    def __init__(self, heartbeat: HeartbeatWriter) -> None:
        self._heartbeat = heartbeat
        self._before = int(Phase.START)
        self.began_at: dict[str, int] = {}
        """The compilations in steps that were not reported yet, by torch's id: the step at which
        each began. Not those in an evaluation: a model in evaluation mode is compiled again, as it
        should be."""
        self.reported: set[str] = set()
        """The functions whose recompilation was reported."""
        self.is_usual_until = 0
        """The step up to which a recompilation is usual, and not reported."""

    def attach(self) -> None:
        """Also after `torch._dynamo.reset()`, which forgets it."""
        handler: Any = sys.modules[CALLBACKS].callback_handler
        if self._begin not in handler.start_callbacks:
            handler.register_start_callback(self._begin)
            handler.register_end_callback(self._end)

    def detach(self) -> None:
        handler: Any = sys.modules[CALLBACKS].callback_handler
        if self._begin in handler.start_callbacks:
            handler.remove_start_callback(self._begin)
            handler.remove_end_callback(self._end)

    # These marks are not counted: a loop that has no others must still be recognized as one without
    # heartbeats.

    def _begin(self, started: Any) -> None:
        self._before = self._heartbeat.phase
        if self._before not in _OUTSIDE_STEPS:
            self.began_at[started.compile_id] = self._heartbeat.step
        self._heartbeat.mark(Phase.COMPILE, 0)

    def _end(self, _: Any) -> None:
        self._heartbeat.mark(self._before, 0)
