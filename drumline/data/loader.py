"""Batches on the device: for training this rank's part of each global batch, in the epoch's shuffled
order; for evaluation each sample exactly once over all ranks, in order, never augmented.

The engine takes optimizer steps from `steps`; a user's own loop iterates. Both start at `cursor`
and move it; epochs follow each other without a call of `set_epoch`. `Loader` is the base class of
`IndexedLoader` and `StreamLoader`.

The content of an evaluation batch does not depend on the world size, so sums over batches, added up
by batch number, do not either. Every rank reads all of a stream, and keeps its own batches; their
number is known after a complete pass.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from drumline.base.errors import DataError, UsageError
from drumline.data.dataset import BatchRequest, check_stream, content_hash
from drumline.data.delivery import (
    BatchProducer,
    Delivery,
    LoadingOptions,
    batch_maker_for,
    to_device,
)
from drumline.data.sharding import Cursor, Sharding, StepPlan, plan_epoch, plan_step
from drumline.data.stream_readers import StreamReader, UnknownLengthError, read_stream
from drumline.watch.heartbeat import LoopHeartbeats

_END = object()

# the same each time: evaluation must not depend on the seed of the run
_STREAM_SEEDS = (0, 0xE7A1)


class MicroBatch(NamedTuple):
    """One micro-batch on the device."""

    data: Any
    size: int
    """The number of its samples; 0: a placeholder, to be run with weight 0 so that collectives
    still match."""

    is_last: bool
    """Whether it is the last of the step: gradients are synchronized here."""

    shard: int
    """Which shard of the global batch it belongs to."""

    ends_shard: bool
    """Whether it is the shard's last micro-batch."""


class Step(NamedTuple):
    """One optimizer step: its plan, and its micro-batches, all of which must be taken before the
    next step."""

    plan: StepPlan
    micro_batches: Iterator[MicroBatch]


def observed(
    batches: Iterator[Any],
    observer: LoopHeartbeats | None,
    *,
    steps_done: Callable[[], int | None] = lambda: None,
) -> Iterator[Any]:
    """The same batches, with notifications to the observer."""
    if observer is None:
        yield from batches
        return

    observer.batch_requested(steps_done())
    while (batch := next(batches, _END)) is not _END:
        observer.batch_ready()
        yield batch
        observer.batch_requested(steps_done())

    observer.epoch_ended()


class Loader(ABC):
    """This rank's training batches, on its device: `for batch in loader` are those of one epoch.

    `DDPManager.loader` makes it."""

    scale: float = 1.0
    """For the current batch: a mean loss times this, averaged over ranks by DDP, is the exact
    global mean."""

    is_last_micro_batch: bool = True
    """Whether the current batch is the last of its optimizer step: synchronize gradients, then call
    the optimizer."""

    waited_s: float = 0.0
    """How long steps have waited for their batches so far."""

    count_tokens: Callable[[Any], int | None] | None = None
    """How many tokens a micro-batch has; None: they are not counted."""

    num_tokens: int = 0
    """Of the micro-batches that steps have taken so far, on this rank."""

    observer: LoopHeartbeats | None = None
    """Notified while a user's loop iterates; the engine, which uses `steps`, marks its own
    heartbeats."""

    num_samples: int | None
    """In an epoch, over all ranks; None for a stream, whose length is unknown."""

    steps_per_epoch: int | None

    def __init__(self, sharding: Sharding) -> None:
        sharding.check()
        self.sharding = sharding
        self._cursor = Cursor()

    @property
    def cursor(self) -> Cursor:
        """Where the next global batch starts. A checkpoint holds only this, unless a stream has its
        own state."""
        return self._cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self._set_cursor(cursor)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0: those that are left of ten are `range(loader.epoch,
        10)`."""
        return self._cursor.epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the next global batch starts, for a checkpoint: after the last whole step."""
        return {
            "epoch": self._cursor.epoch,
            "position": self._cursor.position,
            "stream": self.stream_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there, on any number of ranks."""
        self.load_stream_state(state["stream"])
        self.cursor = Cursor(state["epoch"], state["position"])

    @property
    @abstractmethod
    def steps_done(self) -> int:
        """The number of optimizer steps before the cursor, as far as it is known."""

    def stream_state(self) -> dict[str, Any] | None:
        """This rank's position in a stream with a state of its own; None: the cursor is all."""
        return None

    def load_stream_state(self, state: Mapping[str, Any] | None) -> None:  # noqa: B027 - nothing to do
        """Move to where `stream_state` was taken."""

    @abstractmethod
    def __len__(self) -> int:
        """Micro-batches in one whole epoch; the same on every rank."""

    @abstractmethod
    def close(self) -> None:
        """End the worker processes."""

    @abstractmethod
    def _set_cursor(self, cursor: Cursor) -> None: ...

    @abstractmethod
    def _next_plan(self) -> StepPlan:
        """The step at the cursor."""

    @abstractmethod
    def _batches_of(self, plan: StepPlan) -> Iterator[Any]:
        """The batches of that step on the device, one for each of its spans. More may follow."""

    @abstractmethod
    def _move_past(self, plan: StepPlan) -> None:
        """All batches of that step were taken: the cursor moves to the next."""

    def steps(self) -> Iterator[Step]:
        """The steps from the cursor to the end of its epoch."""
        epoch = self._cursor.epoch
        while self._cursor.epoch == epoch:
            plan = self._next_plan()
            yield Step(plan, self._micro_batches(plan))
            if self._cursor != plan.next_cursor:
                raise UsageError(
                    "the next step was requested before all micro-batches of the last one were taken",
                    next_step="take every item of step.micro_batches before the next step",
                )

    def _micro_batches(self, plan: StepPlan) -> Iterator[MicroBatch]:
        batches = self._batches_of(plan)
        for number, span in enumerate(plan.spans, start=1):
            started_at = time.perf_counter()
            data = next(batches)
            self.waited_s += time.perf_counter() - started_at
            if self.count_tokens is not None and span.size:
                self.num_tokens += self.count_tokens(data) or 0

            is_last = number == len(plan.spans)
            if is_last:
                # Before the last batch is yielded: a checkpoint after the optimizer step needs the
                # new cursor.
                self._move_past(plan)

            yield MicroBatch(data, span.size, is_last, span.shard, span.ends_shard)

        if not plan.spans:  # a rank may have none of a short batch's shards
            self._move_past(plan)

    def __iter__(self) -> Iterator[Any]:
        """The batches from the cursor to the end of its epoch; iterate again for the next epoch."""
        self._refuse_shards()
        return observed(self._batches_of_steps(), self.observer, steps_done=lambda: self.steps_done)

    def _batches_of_steps(self) -> Iterator[Any]:
        for step in self.steps():
            for micro in step.micro_batches:
                self.scale = self.sharding.world_size * micro.size / step.plan.global_size
                self.is_last_micro_batch = micro.is_last
                yield micro.data

    def _refuse_shards(self) -> None:
        if self.sharding.shards is not None:
            raise UsageError(
                "with shards only steps() can be used: ranks have different numbers of batches",
                next_step="leave shards out, or take steps from loader.steps()",
            )


class IndexedLoader(Loader):
    """This rank's training batches of a dataset with samples by index, or whole batches."""

    num_samples: int
    steps_per_epoch: int

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
        maker = batch_maker_for(dataset, options, device, seed=seed)
        self.num_samples = maker.length
        self.steps_per_epoch = -(-maker.length // sharding.batch_size)
        self._maker = maker
        self._producer = BatchProducer(maker, options, device)
        self._delivery = Delivery(device, maker.finish)
        self._batches: Iterator[Any] = iter(())

        # the step that the next of these batches belongs to
        self._batches_at: Cursor | None = None

    def _set_cursor(self, cursor: Cursor) -> None:
        if not (cursor.epoch >= 0 and 0 <= cursor.position < self.num_samples):
            raise DataError(
                f"the checkpoint is at sample {cursor.position} of epoch {cursor.epoch}, "
                f"but the dataset has {self.num_samples} samples",
                next_step="resume with the dataset that the run began with, or start a new run",
            )
        self._cursor = cursor

    @property
    def steps_done(self) -> int:
        steps_in_epoch = self._cursor.position // self.sharding.batch_size
        return self._cursor.epoch * self.steps_per_epoch + steps_in_epoch

    def __len__(self) -> int:
        """Micro-batches in one whole epoch; the same on every rank."""
        self._refuse_shards()
        full_steps, remainder = divmod(self.num_samples, self.sharding.batch_size)
        count = full_steps * len(self._plan(Cursor()).spans)
        if remainder:
            count += len(self._plan(Cursor(0, self.num_samples - remainder)).spans)

        return count

    def preview(self, most: int | None = None) -> Any:
        """The next micro-batch, with at most `most` samples, without taking it. None: this rank has
        no shard of it."""
        spans = self._next_plan().spans
        if not spans:
            return None

        low = spans[0].low
        high = spans[0].high
        if most is not None:
            high = min(high, low + most)

        return self._make(low, high, self._cursor.epoch)

    def batches_after(self, cursor: Cursor, num_steps: int) -> Iterator[Any]:
        """The micro-batches of the step `num_steps` after a cursor, made again; the cursor is not
        moved."""
        plan = self._plan(cursor)
        for _ in range(num_steps):
            plan = self._plan(plan.next_cursor)
        for span in plan.spans:
            yield self._make(span.low, span.high, plan.epoch)

    def resize_shards(self, sizes: tuple[int, ...] | None) -> None:
        """Split global batches like this from the cursor on (`Sharding.sizes`). Batches that were
        made ahead are made again."""
        self.sharding = replace(self.sharding, sizes=sizes)
        self._batches_at = None

    def close(self) -> None:
        """End the worker processes."""
        self._batches = iter(())
        self._batches_at = None
        self._producer.close()

    def _make(self, low: int, high: int, epoch: int) -> Any:
        return self._delivery.deliver(self._maker[BatchRequest(epoch, low, high, shuffled=True)])

    def _plan(self, cursor: Cursor) -> StepPlan:
        return plan_step(cursor, length=self.num_samples, sharding=self.sharding)

    def _next_plan(self) -> StepPlan:
        return self._plan(self._cursor)

    def _batches_of(self, plan: StepPlan) -> Iterator[Any]:
        cursor = Cursor(plan.epoch, plan.start)
        endless = self._producer.is_persistent
        if self._batches_at != cursor or (cursor.position == 0 and not endless):
            requests = _requests(
                cursor,
                length=self.num_samples,
                sharding=self.sharding,
                endless=endless,
            )
            self._batches = self._delivery.batches(self._producer.batches(requests))

        # Until the step is complete: if it is abandoned, its batches are made again.
        self._batches_at = None
        return self._batches

    def _move_past(self, plan: StepPlan) -> None:
        self._cursor = self._batches_at = plan.next_cursor


def _requests(
    cursor: Cursor,
    *,
    length: int,
    sharding: Sharding,
    endless: bool,
) -> Iterator[BatchRequest]:
    """This rank's batches from a cursor on. `endless`: into the next epochs too, so that persistent
    workers have the first batches of an epoch ready when it begins."""
    has_any = True
    while has_any:
        # A rank may have no shard in a whole epoch, and then has none in any: there is nothing to
        # request.
        has_any = endless and cursor.position > 0
        for plan in plan_epoch(cursor, length=length, sharding=sharding):
            for span in plan.spans:
                has_any = endless
                yield BatchRequest(plan.epoch, span.low, span.high, shuffled=True)
            cursor = plan.next_cursor


# Evaluation


class EvaluationBatch(NamedTuple):
    """One batch on the device."""

    number: int
    """Which one it is of the batches of all ranks."""

    size: int
    """0: the batch does not count. It is the last one of a rank that has one batch fewer than
    others."""

    data: Any


class EvaluationLoader(ABC):
    """This rank's evaluation batches: every `world_size`-th of all. A rank may have fewer than
    others, or none."""

    num_samples: int | None = None
    """The number of samples of all ranks; None: not known before a complete pass over a stream."""

    digest: str = ""
    """A hash of the first sample of the latest pass over a stream. Other datasets are compared
    before step 1."""

    observer: LoopHeartbeats | None = None
    """Notified while a user's loop iterates; the engine, which uses `numbered`, marks its own
    heartbeats."""

    _producer: BatchProducer

    def __init__(self, dataset: Any, sharding: Sharding) -> None:
        if sharding.batch_size < 1:
            raise UsageError(
                f"evaluation batches cannot have {sharding.batch_size} samples",
                next_step="set it to 1 or more",
            )

        self._name = type(dataset).__name__
        self._sharding = sharding

    @property
    def num_batches(self) -> int:
        """How many batches all ranks have together."""
        if self.num_samples is None:
            raise UnknownLengthError(self._name)
        return -(-self.num_samples // self._sharding.batch_size)

    @abstractmethod
    def __len__(self) -> int:
        """How many batches this rank has."""

    @abstractmethod
    def numbered(self, *, padded: bool = False) -> Iterator[EvaluationBatch]:
        """This rank's batches in order, with the number of each and its size. `padded`: the same
        number of them on every rank, so that the last one may not count."""

    def __iter__(self) -> Iterator[Any]:
        """The same without numbers."""
        return observed((batch.data for batch in self.numbered()), self.observer)

    def close(self) -> None:
        """End the worker processes."""
        self._producer.close()


class IndexedEvaluationLoader(EvaluationLoader):
    """Reads a dataset with samples by index, or whole batches."""

    num_samples: int

    def __init__(
        self,
        dataset: Any,
        *,
        sharding: Sharding,
        device: torch.device,
        options: LoadingOptions,
    ) -> None:
        super().__init__(dataset, sharding)

        # The seed matters only for a dataset that is random even in evaluation: its samples are the
        # same each time.
        maker = batch_maker_for(dataset, options, device, seed=0)
        self.num_samples = maker.length
        self._numbers = range(sharding.rank, self.num_batches, sharding.world_size)
        self._producer = BatchProducer(maker, options, device)
        self._delivery = Delivery(device, maker.finish)

    def __len__(self) -> int:
        return len(self._numbers)

    def numbered(self, *, padded: bool = False) -> Iterator[EvaluationBatch]:
        size = self._sharding.batch_size
        requests: list[BatchRequest] = []
        expected: list[tuple[int, int]] = []
        for number in self._numbers:
            low = number * size
            high = min(low + size, self.num_samples)
            requests.append(BatchRequest(0, low, high, shuffled=False))
            expected.append((number, high - low))

        if padded and _has_fewer(self._sharding, self.num_batches):
            requests.append(BatchRequest(0, 0, 1, shuffled=False))
            expected.append((-1, 0))

        batches = self._delivery.batches(self._producer.batches(requests))
        # Up to the end of `batches`, which ends its workers.
        for (number, batch_size), data in zip(expected, batches, strict=True):
            yield EvaluationBatch(number, batch_size, data)


def _has_fewer(sharding: Sharding, num_batches: int) -> bool:
    """Whether this rank has one batch fewer than rank 0."""
    return sharding.rank >= num_batches % sharding.world_size > 0


class _EndOfPass(NamedTuple):
    """A reader's last answer."""

    num_samples: int
    digest: str
    """A hash of the first sample."""


class EvaluationReader(StreamReader):
    """Answers with this rank's batches one by one, and at the end with the number of samples that
    all ranks have."""

    def _answers_from(self, start: Any) -> Iterator[EvaluationBatch | _EndOfPass]:
        size = self._sharding.batch_size
        rank = self._sharding.rank
        world_size = self._sharding.world_size
        samples: list[Any] = []
        count = 0
        digest = ""
        self._set_epoch(0)

        for count, sample in enumerate(self._samples(*_STREAM_SEEDS), 1):
            if count == 1:
                digest = content_hash(sample).hex()

            number = (count - 1) // size
            if number % world_size == rank:
                samples.append(sample)

            if len(samples) == size:
                yield EvaluationBatch(number, size, self._collate(samples))
                samples = []

        if count == 0:
            raise DataError(
                f"the stream {self._name} is empty",
                next_step="check the path and the split it reads",
            )

        if samples:
            yield EvaluationBatch((count - 1) // size, len(samples), self._collate(samples))
        if _has_fewer(self._sharding, -(-count // size)):
            yield EvaluationBatch(-1, 0, self._collate([sample]))

        while True:  # a worker may be asked for more
            yield _EndOfPass(count, digest)


class StreamEvaluationLoader(EvaluationLoader):
    """Reads a stream."""

    def __init__(
        self,
        dataset: Any,
        *,
        sharding: Sharding,
        device: torch.device,
        options: LoadingOptions,
    ) -> None:
        super().__init__(dataset, sharding)
        check_stream(dataset)
        self._device = device
        reader = EvaluationReader(dataset, sharding=sharding, seed=0, collate=options.collate)

        # No warning about several workers: the training loader has already logged it.
        self._producer = BatchProducer(
            reader, replace(options, workers=min(options.workers, 1)), device
        )

    def __len__(self) -> int:
        raise UnknownLengthError(self._name)

    def numbered(self, *, padded: bool = False) -> Iterator[EvaluationBatch]:
        for answer in read_stream(self._producer, start=True):
            if isinstance(answer, _EndOfPass):
                self.num_samples, self.digest = answer
                if not self._producer.is_persistent:
                    self._producer.close()
                return
            if answer.size or padded:
                yield answer._replace(data=to_device(answer.data, self._device))
