"""A stream that every rank reads whole: its samples are dealt to the ranks like cards, those of others are dropped.

A global batch is the next `batch_size` samples, whatever the number of ranks. Sample number n of it belongs to part
n % parts, so a rank need not know how long the batch will be to know what is its own. Only the first few samples of a
batch are kept on every rank: a batch that ends with them is cut into fewer parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, default_collate

from drumline.data.fetch import generators_put_back
from drumline.data.fingerprint import content_hash
from drumline.data.plan import Cursor, Sharing, StepPlan, own_parts, plan_step
from drumline.data.streamed import END, Ask, Pass, ReadStep, tell_epoch
from drumline.errors import DataError

_SEEDS = 0xDEA1  # sets these seeds apart from all others that are made of (seed, epoch, number)


class DealtReader(Dataset[Any]):
    """Answers with this rank's part of each step; a DataError is an answer too, to be raised by who asked."""

    def __init__(
        self,
        dataset: Any,
        *,
        sharing: Sharing,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._dataset = dataset
        self._name = type(dataset).__name__
        self._sharing = sharing
        self._seed = seed
        self._collate = collate or default_collate
        self._own = own_parts(sharing.batch_size, sharing)
        # One sample more, and the batch has enough for all its parts. Placeholders are made of the first `least`.
        self._num_shared = max(sharing.least, sharing.parts * sharing.least - 1)
        self._pass: Pass
        self._epoch = 0
        self._ahead: Any = END  # read, and not yet dealt: it tells whether the step before it was the last

    def __getitem__(self, ask: Ask) -> ReadStep | DataError:
        try:
            with generators_put_back():
                if ask.opening is not None:
                    self._open(ask.opening)
                elif self._ahead is END:
                    self._begin(self._epoch + 1)
                return self._read(with_digest=ask.opening is not None)
        except DataError as error:
            return error

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        tell_epoch(self._dataset, epoch)
        self._pass = Pass(self._dataset, seeds=(self._seed, _SEEDS, epoch))
        self._ahead = self._pass.take()
        if self._ahead is END:
            raise DataError(
                f"the stream {self._name} is empty in epoch {epoch}",
                next_step="check the path it reads, and that its __iter__ starts from the beginning each time",
            )

    def _open(self, cursor: Cursor) -> None:
        self._begin(cursor.epoch)
        for position in range(cursor.position):
            self._next()
            if self._ahead is END:
                raise DataError(
                    f"the run stands at sample {cursor.position} of epoch {cursor.epoch}, "
                    f"but the stream {self._name} ended after {position + 1} samples",
                    next_step="resume with the dataset that the run began with, or start a new run",
                )

    def _next(self) -> Any:
        sample, self._ahead = self._ahead, self._pass.take()
        return sample

    def _read(self, *, with_digest: bool) -> ReadStep:
        start, size = self._pass.position - 1, 0
        kept: dict[int, Any] = {}
        while size < self._sharing.batch_size and self._ahead is not END:
            sample = self._next()
            if size < self._num_shared or size % self._sharing.parts in self._own:
                kept[size] = sample
            size += 1
        length = start + size + (self._ahead is not END)  # of the epoch, as far as it is known
        plan = plan_step(Cursor(self._epoch, start), length=length, sharing=self._sharing)
        batches = [self._collate([kept[number] for number in numbers]) for numbers in _dealt(plan)]
        return ReadStep(plan, batches, digest=content_hash(kept[0]).hex() if with_digest else "")


def _dealt(plan: StepPlan) -> Iterator[range]:
    """For each piece of a plan the numbers of its samples in the global batch. A plan gives each part a range of
    positions; dealt out one by one, each part gets as many."""
    starts: dict[int, int] = {}
    for piece in plan.pieces:
        if piece.counts:
            first = piece.low - starts.setdefault(piece.part, piece.low)
            yield range(plan.global_size)[piece.part :: plan.num_parts][first : first + piece.size]
        else:
            yield range(piece.low - plan.start, piece.high - plan.start)
