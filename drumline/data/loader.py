"""Training batches on the device: this rank's share of each global batch, in the epoch's shuffled order.

The engine takes optimizer steps from `steps`; a loop of the user's own simply iterates. Both start at
`cursor` and move it, so that it always says where the run stands; epochs follow each other without anyone
having to remember `set_epoch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from drumline.data.delivery import Delivery
from drumline.data.fetch import Request
from drumline.data.plan import Cursor, Sharing, StepPlan, micro_batches_per_epoch, plan_epoch
from drumline.data.serving import BatchServer, Loading, fetch_for
from drumline.data.steps import Micro, Step, StepLoader, not_taken_whole
from drumline.errors import DataError, UsageError


class Loader(StepLoader):
    """This rank's training batches."""

    def __init__(
        self,
        dataset: Any,
        *,
        sharing: Sharing,
        device: torch.device,
        seed: int,
        loading: Loading,
    ) -> None:
        check_sizes(sharing)
        fetch = fetch_for(dataset, loading, device, seed=seed)
        self.steps_per_epoch = -(-fetch.length // sharing.batch_size)
        self.num_samples = fetch.length
        self.sharing = sharing
        self._fetch = fetch
        self._cursor = Cursor()
        self._server = BatchServer(fetch, loading, device)
        self._delivery = Delivery(device, fetch.finish)
        self._batches: Iterator[Any] = iter(())
        self._batches_at: Cursor | None = None  # the step that the next of these batches belongs to

    @property
    def cursor(self) -> Cursor:
        """Where the next global batch starts. A checkpoint holds this, and nothing per rank."""
        return self._cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        if not (cursor.epoch >= 0 and 0 <= cursor.position < self.num_samples):
            raise DataError(
                f"the run stands at sample {cursor.position} of epoch {cursor.epoch}, "
                f"but the dataset has {self.num_samples} samples",
                next_step="resume with the dataset that the run began with, or start a new run",
            )
        self._cursor = cursor

    @property
    def steps_done(self) -> int:
        """How many optimizer steps come before the cursor."""
        return self._cursor.epoch * self.steps_per_epoch + self._cursor.position // self.sharing.batch_size

    def state_dict(self) -> None:
        """Nothing: the cursor says it all. Only a stream with a state of its own has more to save."""

    def load_state_dict(self, state: None) -> None:
        """Nothing to do: see `state_dict`."""

    def __len__(self) -> int:
        """Micro-batches in one whole epoch; the same on every rank."""
        self._refuse_shards()
        return micro_batches_per_epoch(length=self.num_samples, sharing=self.sharing)

    def steps(self) -> Iterator[Step]:
        """The steps from the cursor to the end of its epoch."""
        for plan in self._plans(self._cursor):
            yield Step(plan, self._micro_batches(plan))
            if self._cursor != plan.following:
                raise not_taken_whole()

    def preview(self, most: int | None = None) -> Any:
        """The next micro-batch, which stays the next; of its samples `most`, if given. None: this rank has none of a
        short batch's shards."""
        pieces = next(self._plans(self._cursor)).pieces
        if not pieces:
            return None
        piece = pieces[0]
        high = piece.high if most is None else min(piece.high, piece.low + most)
        return self._made(piece.low, high, self._cursor.epoch)

    def batches_after(self, cursor: Cursor, num_steps: int) -> Iterator[Any]:
        """The micro-batches of the step so many steps after a cursor, made anew; nothing is moved."""
        for _ in range(num_steps):
            cursor = next(self._plans(cursor)).following
        for piece in next(self._plans(cursor)).pieces:
            yield self._made(piece.low, piece.high, cursor.epoch)

    def _made(self, low: int, high: int, epoch: int) -> Any:
        return self._delivery.now(self._fetch[Request(epoch, low, high, shuffled=True)])

    def close(self) -> None:
        """End the worker processes."""
        self._batches, self._batches_at = iter(()), None
        self._server.close()

    def _micro_batches(self, plan: StepPlan) -> Iterator[Micro]:
        batches = self._batches_from(Cursor(plan.epoch, plan.start))
        self._batches_at = None  # until the step is complete: if it is given up, its batches are made again
        left = len(plan.pieces)
        for piece in plan.pieces:
            asked = time.perf_counter()
            data = next(batches)
            self.waited_s += time.perf_counter() - asked
            left -= 1
            if not left:
                # Moved before the batch is handed out: a checkpoint after the optimizer step holds the right
                # cursor.
                self._cursor = self._batches_at = plan.following
            yield Micro(data, piece.size, not left, piece.part, piece.ends_part)
        if not plan.pieces:  # a rank may have none of a short batch's shards
            self._cursor = self._batches_at = plan.following

    def _batches_from(self, cursor: Cursor) -> Iterator[Any]:
        endless = self._server.outlives_a_sequence
        if self._batches_at != cursor or (cursor.position == 0 and not endless):
            requests = _requests(self._plans, cursor, endless=endless)
            self._batches = self._delivery.batches(self._server.batches(requests))
        return self._batches

    def _plans(self, cursor: Cursor) -> Iterator[StepPlan]:
        return plan_epoch(cursor, length=self.num_samples, sharing=self.sharing)


def _requests(
    plans_from: Callable[[Cursor], Iterator[StepPlan]], cursor: Cursor, *, endless: bool
) -> Iterator[Request]:
    """What is asked of the stream. Workers that stay go on into the next epoch by themselves, so that its first
    batches are ready when it begins."""
    has_any = True
    while has_any:
        # A rank may have no shard of a whole epoch, and then has none of any: there is nothing to ask for.
        has_any = endless and cursor.position > 0
        for plan in plans_from(cursor):
            for piece in plan.pieces:
                has_any = endless
                yield Request(plan.epoch, piece.low, piece.high, shuffled=True)
            cursor = plan.following


def check_sizes(sharing: Sharing) -> None:
    """Refuse a batch that cannot be cut up as it should."""
    size, world_size, shards = sharing.batch_size, sharing.world_size, sharing.shards
    if size < sharing.parts:
        what = f"shared by {world_size} ranks" if shards is None else f"cut into {shards} shards"
        fewer = "start fewer ranks" if shards is None else "choose fewer shards"
        raise UsageError(
            f"a global batch of {size} cannot be {what}: each needs a sample",
            next_step=f"set the batch size to {sharing.parts} or more, or {fewer}",
        )
    if shards is not None and shards < world_size:
        raise UsageError(
            f"{world_size} ranks cannot share {shards} shards: some would have nothing to do",
            next_step=f"start at most {shards} ranks, or begin a new run with --train.shards {world_size}",
        )
    for name, value in (("accumulate", sharing.accumulate), ("micro_batch_size", sharing.micro_batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{name} cannot be {value}", next_step=f"set {name} to 1 or more")
