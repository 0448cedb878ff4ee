"""Training batches on the device: this rank's part of each global batch, in the epoch's shuffled order.

The engine takes optimizer steps from `steps`; a loop of the user's own simply iterates. Both start at `cursor` and move
it; epochs follow each other without a call of `set_epoch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from drumline.data.dataset import BatchRequest, is_stream
from drumline.data.delivery import Delivery
from drumline.data.sharding import Cursor, Sharding, StepPlan, check_sharding, micro_batches_per_epoch, plan_epoch
from drumline.data.steps import MicroBatch, Step, StepLoader, incomplete_step
from drumline.data.stream_loader import StreamLoader
from drumline.data.workers import BatchProducer, LoadingOptions, batch_maker_for
from drumline.errors import DataError


class Loader(StepLoader):
    """This rank's training batches of a dataset with samples by index, or whole batches."""

    def __init__(
        self, dataset: Any, *, sharding: Sharding, device: torch.device, seed: int, options: LoadingOptions
    ) -> None:
        check_sharding(sharding)
        maker = batch_maker_for(dataset, options, device, seed=seed)
        self.steps_per_epoch = -(-maker.length // sharding.batch_size)
        self.num_samples = maker.length
        self.sharding = sharding
        self._maker = maker
        self._cursor = Cursor()
        self._producer = BatchProducer(maker, options, device)
        self._delivery = Delivery(device, maker.finish)
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
                f"the checkpoint is at sample {cursor.position} of epoch {cursor.epoch}, "
                f"but the dataset has {self.num_samples} samples",
                next_step="resume with the dataset that the run began with, or start a new run",
            )
        self._cursor = cursor

    @property
    def steps_done(self) -> int:
        return self._cursor.epoch * self.steps_per_epoch + self._cursor.position // self.sharding.batch_size

    def state_dict(self) -> None:
        """None: the cursor is all. Only a stream with a state of its own has more to save."""

    def load_state_dict(self, state: None) -> None:
        """Nothing to do: see `state_dict`."""

    def __len__(self) -> int:
        """Micro-batches in one whole epoch; the same on every rank."""
        self._refuse_shards()
        return micro_batches_per_epoch(length=self.num_samples, sharding=self.sharding)

    def steps(self) -> Iterator[Step]:
        for plan in self._plans(self._cursor):
            yield Step(plan, self._micro_batches(plan))
            if self._cursor != plan.next_cursor:
                raise incomplete_step()

    def preview(self, most: int | None = None) -> Any:
        """The next micro-batch, without taking it; of its samples `most`, if given. None: this rank has none of a
        short batch's shards."""
        spans = next(self._plans(self._cursor)).spans
        if not spans:
            return None
        low, high = spans[0].low, spans[0].high
        return self._make(low, high if most is None else min(high, low + most), self._cursor.epoch)

    def batches_after(self, cursor: Cursor, num_steps: int) -> Iterator[Any]:
        """The micro-batches of the step so many steps after a cursor, made anew; nothing is moved."""
        for _ in range(num_steps):
            cursor = next(self._plans(cursor)).next_cursor
        for span in next(self._plans(cursor)).spans:
            yield self._make(span.low, span.high, cursor.epoch)

    def close(self) -> None:
        """End the worker processes."""
        self._batches, self._batches_at = iter(()), None
        self._producer.close()

    def _make(self, low: int, high: int, epoch: int) -> Any:
        return self._delivery.deliver(self._maker[BatchRequest(epoch, low, high, shuffled=True)])

    def _micro_batches(self, plan: StepPlan) -> Iterator[MicroBatch]:
        batches = self._batches_from(Cursor(plan.epoch, plan.start))
        self._batches_at = None  # until the step is complete: if it is abandoned, its batches are made again
        left = len(plan.spans)
        for span in plan.spans:
            asked = time.perf_counter()
            data = next(batches)
            self.waited_s += time.perf_counter() - asked
            left -= 1
            if not left:
                # Moved before the batch is handed out: a checkpoint after the optimizer step holds the right cursor.
                self._cursor = self._batches_at = plan.next_cursor
            yield MicroBatch(data, span.size, not left, span.shard, span.ends_shard)
        if not plan.spans:  # a rank may have none of a short batch's shards
            self._cursor = self._batches_at = plan.next_cursor

    def _batches_from(self, cursor: Cursor) -> Iterator[Any]:
        endless = self._producer.is_persistent
        if self._batches_at != cursor or (cursor.position == 0 and not endless):
            requests = _requests(self._plans, cursor, endless=endless)
            self._batches = self._delivery.batches(self._producer.batches(requests))
        return self._batches

    def _plans(self, cursor: Cursor) -> Iterator[StepPlan]:
        return plan_epoch(cursor, length=self.num_samples, sharding=self.sharding)


def _requests(
    plans_from: Callable[[Cursor], Iterator[StepPlan]], cursor: Cursor, *, endless: bool
) -> Iterator[BatchRequest]:
    """This rank's batches from a cursor on. `endless`: into the next epochs too, so that persistent workers have the
    first batches of an epoch ready when it begins."""
    has_any = True
    while has_any:
        # A rank may have no shard of a whole epoch, and then has none of any: there is nothing to request.
        has_any = endless and cursor.position > 0
        for plan in plans_from(cursor):
            for span in plan.spans:
                has_any = endless
                yield BatchRequest(plan.epoch, span.low, span.high, shuffled=True)
            cursor = plan.next_cursor


AnyLoader = Loader | StreamLoader


def make_loader(dataset: Any, **settings: Any) -> AnyLoader:
    """This rank's training batches, however the dataset is read."""
    return (StreamLoader if is_stream(dataset) else Loader)(dataset, **settings)
