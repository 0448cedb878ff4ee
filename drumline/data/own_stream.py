"""A stream that keeps its own place (`state_dict`, `load_state_dict`): every rank reads one of its own.

What a rank gets is for the dataset to decide, most often by rank. A rank takes as many samples in a step as its share
of a global batch has; a stream that ends starts over. Its state after each step travels with the step's batches, so
that a checkpoint holds the place of the steps that were taken, not of those that were read ahead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate

from drumline.data.fetch import generators_put_back
from drumline.data.fingerprint import content_hash
from drumline.data.plan import Cursor, Sharing, StepPlan, plan_step
from drumline.data.streamed import END, Ask, Pass, ReadStep, tell_epoch
from drumline.errors import DataError

_SEEDS = 0x0A17  # sets these seeds apart from all others that are made of (seed, rank, round, number)


class OwnPlace(NamedTuple):
    """Where one rank's stream stands."""

    position: int = 0
    """Samples that all ranks have taken together."""
    round: int = 0
    """How often the stream has started over."""
    taken: int = 0
    """Samples that this rank has taken in this round."""
    dataset: Any = None
    """What the dataset says of its place; None: its beginning."""


class OwnReader(Dataset[Any]):
    """Answers with this rank's steps; a DataError is an answer too, to be raised by who asked."""

    def __init__(
        self,
        dataset: Any,
        *,
        sharing: Sharing,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._dataset = dataset
        self._sharing = sharing
        self._seeds = (seed, _SEEDS, sharing.rank)
        self._collate = collate or default_collate
        self._beginning = self._state()
        self._was_opened = False
        self._pass: Pass
        self._position = self._round = 0

    def __getitem__(self, ask: Ask) -> ReadStep | DataError:
        try:
            with generators_put_back():
                if ask.opening is not None:
                    self._open(ask.opening)
                return self._read(with_digest=ask.opening is not None)
        except DataError as error:
            return error

    def _open(self, place: OwnPlace) -> None:
        self._position, self._round = place.position, place.round
        tell_epoch(self._dataset, place.round)
        if place.position or self._was_opened:
            self._dataset.load_state_dict(copy.deepcopy(place.dataset if place.position else self._beginning))
        self._was_opened = True
        self._start_pass(taken=place.taken)

    def _start_pass(self, *, taken: int = 0) -> None:
        self._pass = Pass(self._dataset, seeds=(*self._seeds, self._round), position=taken)

    def _read(self, *, with_digest: bool) -> ReadStep:
        start, size = self._position, self._sharing.batch_size
        # Every step is full: for a plan the epoch has no end.
        plan = plan_step(Cursor(0, start), length=start + size + 1, sharing=self._sharing)
        samples = [self._next() for _ in range(plan.local_size)]
        self._position = plan.stop
        place = OwnPlace(plan.stop, self._round, self._pass.position, self._state())
        digest = content_hash(samples[0]).hex() if with_digest else ""
        return ReadStep(plan, self._collated(plan, samples), state=place, digest=digest)

    def _collated(self, plan: StepPlan, samples: list[Any]) -> list[Any]:
        low = plan.share[0]
        return [
            self._collate(
                samples[piece.low - low : piece.high - low]
                if piece.counts
                else samples[: piece.high - piece.low]
            )
            for piece in plan.pieces
        ]

    def _next(self) -> Any:
        while (sample := self._pass.take()) is END:
            if self._pass.position == 0:
                name, rank = type(self._dataset).__name__, self._sharing.rank
                raise DataError(
                    f"the stream {name} is empty in round {self._round} on rank {rank}",
                    next_step="check what it reads on this rank, and that its __iter__ starts anew after its end",
                )
            self._round += 1
            tell_epoch(self._dataset, self._round)
            self._start_pass()
        return sample

    def _state(self) -> Any:
        # A copy: a dataset may give away the very dict that it goes on to change.
        return copy.deepcopy(self._dataset.state_dict())
