"""Training batches of a stream on the device; for the engine and for a user's own loop the same as
an `IndexedLoader`.

The length of a stream is not known: an epoch lasts until it ends, and the next one reads it again.
A resumable stream, which keeps its own position on each rank, has no epochs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from drumline.base.errors import CheckpointError, UsageError, log
from drumline.data.dataset import check_stream, is_resumable
from drumline.data.delivery import BatchProducer, Delivery, LoadingOptions, clone
from drumline.data.loader import IndexedLoader, Loader
from drumline.data.sharding import Cursor, Sharding, StepPlan
from drumline.data.stream_readers import (
    RankStreamReader,
    SharedStreamReader,
    StreamPosition,
    StreamStep,
    UnknownLengthError,
    read_stream,
)


class StreamLoader(Loader):
    """This rank's training batches of a stream."""

    # Not known.
    num_samples: None = None
    steps_per_epoch: None = None

    def __init__(
        self,
        dataset: Any,
        *,
        sharding: Sharding,
        device: torch.device,
        seed: int,
        options: LoadingOptions,
    ) -> None:
        super().__init__(sharding)
        check_stream(dataset)
        self.name = type(dataset).__name__
        self.is_resumable = is_resumable(dataset)
        """Whether the stream keeps its own position on each rank."""

        if self.is_resumable and sharding.shards is not None:
            raise UsageError(
                f"the stream {self.name} decides by rank what it yields, so its samples cannot be cut into shards that "
                "are the same on any number of ranks",
                next_step="train without --train.exact elastic, or give a map-style dataset or an iterable without "
                "state_dict",
            )

        if options.workers > 1 and sharding.rank == 0:
            log.warning(
                f"a stream is read by 1 worker, not {options.workers}: several would split it among them, and the "
                "order of its samples would depend on their number"
            )

        reader = RankStreamReader if self.is_resumable else SharedStreamReader
        self._producer = BatchProducer(
            reader(dataset, sharding=sharding, seed=seed, collate=options.collate),
            # The worker always stays alive between epochs: the stream does not end there.
            replace(options, workers=min(options.workers, 1), persistent_workers=True),
            device,
        )

        # Without a copy to the device, an in-place loss must not change the batch that is kept.
        self._delivery = Delivery(device, clone if device.type == "cpu" else lambda batch: batch)
        self._position = StreamPosition()
        """Of a resumable stream."""

        self._answers: Iterator[Any] = iter(())

        # the step that the next of these answers belongs to
        self._answers_at: Cursor | None = None

        # read, and kept until all of it is taken
        self._current: StreamStep | None = None
        self._steps_of_epochs = 0
        """Of those that this loader has read to their end."""

    def _set_cursor(self, cursor: Cursor) -> None:
        """Move the cursor; everything before it must be read."""
        if cursor == self._cursor:
            return
        if self.is_resumable:
            raise CheckpointError(
                f"the checkpoint is at sample {cursor.position}, but holds no state of the stream {self.name}",
                next_step="resume with the dataset that the run began with, or start a new run",
            )
        self._move_to(cursor)

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps before the cursor; of earlier epochs, only those that this
        loader has read."""
        return self._steps_of_epochs + self._cursor.position // self.sharding.batch_size

    def stream_state(self) -> dict[str, Any] | None:
        """This rank's position in a resumable stream, after the last complete step; None: the
        cursor is enough."""
        if not self.is_resumable:
            return None

        return {
            "world_size": self.sharding.world_size,
            "rank": self.sharding.rank,
            **self._position._asdict(),
        }

    def load_stream_state(self, state: Mapping[str, Any] | None) -> None:
        """Move to the position of `stream_state`, on the same rank and with the same number of
        ranks."""
        if not self.is_resumable or state is None:
            return

        position = dict(state)
        saved = position.pop("world_size")

        now = self.sharding.world_size
        if saved != now:
            raise CheckpointError(
                f"the state of the stream {self.name} was saved on {saved} ranks, now there are {now}: each rank's "
                "state is its own and cannot be split differently",
                next_step=f"resume on {saved} ranks, or begin a new run with a map-style dataset or an iterable "
                "without state_dict, which work on any number of ranks",
            )

        del position["rank"]
        self._position = StreamPosition(**position)
        self._move_to(Cursor(0, self._position.position))

    def __len__(self) -> int:
        raise UnknownLengthError(self.name)

    def preview(self, most: int | None = None) -> Any:
        """The next micro-batch, without taking it; complete, since it is already made. None: this
        rank has none."""
        batches = self._read().batches
        return self._delivery.deliver(batches[0]) if batches else None

    def peek(self) -> str:
        """A digest of the first sample that this loader has read or will read; nothing is taken."""
        return self._read().digest

    def close(self) -> None:
        """End the worker process."""
        self._move_to(self._cursor)
        self._producer.close()

    def _move_to(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._current = None
        self._answers = iter(())
        self._answers_at = None

    def _read(self) -> StreamStep:
        """The step at the cursor. A step that was abandoned half-way is kept, since reading it
        again may take long."""
        if self._current is not None:
            return self._current

        if self._answers_at != self._cursor:
            self._answers = read_stream(
                self._producer, self._position if self.is_resumable else self._cursor
            )

        # Until there is an answer: after an error the stream is opened again.
        self._answers_at = None
        read: StreamStep = next(self._answers)
        self._current = read
        self._answers_at = read.plan.next_cursor

        return read

    def _next_plan(self) -> StepPlan:
        started_at = time.perf_counter()
        plan = self._read().plan
        self.waited_s += time.perf_counter() - started_at
        return plan

    def _batches_of(self, plan: StepPlan) -> Iterator[Any]:
        # Only the batches of this step: the stream is not read ahead here.
        return self._delivery.batches(iter(self._read().batches))

    def _move_past(self, plan: StepPlan) -> None:
        if plan.next_cursor.position == 0:
            self._steps_of_epochs = self.steps_done + 1
        self._position = self._read().state
        self._cursor = plan.next_cursor
        self._current = None


AnyLoader = IndexedLoader | StreamLoader
