"""The beats of a loop that is the user's own: they are made where its batches are handed out."""

from __future__ import annotations

from collections.abc import Callable

from drumline.watch.beats.phase import DATA, Phase
from drumline.watch.beats.record import BeatWriter


class OwnLoop:
    """The `LoaderObserver` (data/steps.py) of a user's loop: data when it waits for a batch, else the phase that its
    batches are for."""

    def __init__(self, beat: BeatWriter, phase: Phase, num_collectives: Callable[[], int]) -> None:
        self._beat = beat
        self._phase = int(phase)
        self._num_collectives = num_collectives
        self._step: int | None = None

    def batch_requested(self, step: int | None) -> None:
        """Of the optimizer step after so many; None: it does not train."""
        if step != self._step and step is not None:
            self._step = step
            self._beat.count_collectives(self._num_collectives())
            self._beat.begin_step(step)
        self._beat.mark(DATA)

    def batch_ready(self) -> None:
        if self._step is not None:
            self._beat.next_micro()
        self._beat.mark(self._phase)

    def epoch_ended(self) -> None:
        self._beat.mark(Phase.USER)
