"""Reading a stream on each rank, with random numbers that depend on the position of a sample.

`SharedStreamReader`: every rank reads the whole stream and keeps its own samples, assigned
round-robin. A global batch is the next `batch_size` samples, on any number of ranks.
`RankStreamReader`: a stream that keeps its own position (`state_dict`, `load_state_dict`) decides
what each rank gets, usually by rank.

A reader runs in the training process, or ahead of it in one worker process. Several workers would
split the stream among them, and the order of samples would depend on their number.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain, count, islice, repeat
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate

from drumline.base.errors import DataError, UsageError
from drumline.data.dataset import content_hash, restored_generators, seed_generators
from drumline.data.delivery import BatchProducer
from drumline.data.sharding import Cursor, Sharding, StepPlan, hash_integers, plan_step

_END = object()
_BEGINNING = -1  # the position whose seed `iter` itself is called with

# These make the seeds of streams differ from all others that are made from (seed, ...).
_SHARED_SEEDS = 0xDEA1
_RANK_SEEDS = 0x0A17


class StreamStep(NamedTuple):
    """A reader's answer: one optimizer step of this rank."""

    plan: StepPlan
    batches: list[Any]
    """One for each span of the plan."""

    digest: str
    """A hash of the first sample, in the first answer after a start; else empty."""

    state: Any = None
    """The `StreamPosition` after this step, of a stream that keeps its own position."""


class StreamPosition(NamedTuple):
    """Where one rank is in a stream that keeps its own position. Checkpoints hold it under these
    names."""

    position: int = 0
    """Samples that all ranks have taken together."""

    round: int = 0
    """How often the stream has started over."""

    taken: int = 0
    """Samples that this rank has taken in this round."""

    dataset: Any = None
    """The dataset's own state; None: its beginning."""


class UnknownLengthError(UsageError, TypeError):
    """The length of a stream is not known. A TypeError too, which `list` expects when there is no
    length."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the length of the stream {name} is not known",
            next_step="count the batches while you take them",
        )


class StreamReader(Dataset[Any]):
    """`reader[start]` opens the stream there and returns the first answer, each `reader[None]` the
    next: this rank's part of a step, or a DataError, which `read_stream` raises in the training
    process."""

    def __init__(
        self,
        dataset: Any,
        *,
        sharding: Sharding,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._dataset = dataset
        self._name = type(dataset).__name__
        self._sharding = sharding
        self._seed = seed
        self._collate = collate or default_collate
        self._answers: Iterator[Any] = iter(())

    def __getitem__(self, start: Any) -> Any:
        try:
            with restored_generators():
                if start is not None:
                    self._answers = self._answers_from(start)
                return next(self._answers)
        except DataError as error:
            return error

    @abstractmethod
    def _answers_from(self, start: Any) -> Iterator[Any]:
        """Answers without end."""

    def _samples(self, *seeds: int, position: int = 0) -> Iterator[Any]:
        """One pass over the stream, from a position on. The global generators are seeded for each
        sample."""
        seed_generators(hash_integers(*seeds, _BEGINNING))
        samples = iter(self._dataset)
        for number in count(position):
            seed_generators(hash_integers(*seeds, number))
            try:
                sample = next(samples)
            except StopIteration:
                return
            except Exception as error:
                error.add_note(f"while reading sample {number} of {self._name}")
                raise

            yield sample

    def _set_epoch(self, epoch: int) -> None:
        """Call the dataset's own `set_epoch`, if it has one."""
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class SharedStreamReader(StreamReader):
    """Sample number n of a global batch belongs to shard n % (number of shards), so a rank knows
    its own samples before the end of the batch is known. Every rank keeps only the first few
    samples of a batch: a batch that ends with them is split into fewer shards."""

    def _answers_from(self, start: Cursor) -> Iterator[StreamStep]:
        sharding = self._sharding
        smallest = self._sharding.min_shard_size
        own_shards = sharding.own_shards(sharding.batch_size)

        # With one more sample the batch has enough for all its shards. Placeholders are made from
        # the first samples.
        num_kept_by_all = max(smallest, sharding.num_shards * smallest - 1)

        for epoch in count(start.epoch):
            position = start.position if epoch == start.epoch else 0
            samples = self._samples_from(Cursor(epoch, position))

            ahead = next(samples, _END)  # read, and not yet assigned
            while ahead is not _END:
                kept_samples: dict[int, Any] = {}
                size = 0
                while size < sharding.batch_size and ahead is not _END:
                    if size < num_kept_by_all or size % sharding.num_shards in own_shards:
                        kept_samples[size] = ahead
                    ahead = next(samples, _END)
                    size += 1

                # Of the epoch, as far as it is known.
                length = position + size + (ahead is not _END)
                plan = plan_step(Cursor(epoch, position), length=length, sharding=sharding)
                batches = [
                    self._collate([kept_samples[number] for number in numbers])
                    for numbers in _round_robin(plan)
                ]

                is_first = Cursor(epoch, position) == start
                digest = content_hash(kept_samples[0]).hex() if is_first else ""
                yield StreamStep(plan, batches, digest)
                position = plan.stop

    def _samples_from(self, cursor: Cursor) -> Iterator[Any]:
        """The samples of an epoch from a position on; at least one, or an error."""
        self._set_epoch(cursor.epoch)
        number = 0
        for number, sample in enumerate(self._samples(self._seed, _SHARED_SEEDS, cursor.epoch), 1):
            if number > cursor.position:
                yield sample

        if number == 0:
            raise DataError(
                f"the stream {self._name} is empty in epoch {cursor.epoch}",
                next_step="check the path it reads, and that its __iter__ starts from the beginning each time",
            )
        if number <= cursor.position:
            raise DataError(
                f"the checkpoint is at sample {cursor.position} of epoch {cursor.epoch}, "
                f"but the stream {self._name} ended after {number} samples",
                next_step="resume with the dataset that the run began with, or start a new run",
            )


def _round_robin(plan: StepPlan) -> Iterator[range]:
    """For each span of a plan the numbers of its samples in the global batch. A plan gives each
    shard a range of positions; assigned round-robin, each shard gets the same number."""
    starts: dict[int, int] = {}
    for span in plan.spans:
        if span.counts:
            first = span.low - starts.setdefault(span.shard, span.low)
            yield range(plan.global_size)[span.shard :: plan.num_shards][first : first + span.size]
        else:
            yield range(span.low - plan.start, span.high - plan.start)


class _TakenSample(NamedTuple):
    """A sample that this rank has taken from a stream that keeps its own position."""

    sample: Any
    round: int
    number: int
    """How many samples of the round were taken with it."""


class RankStreamReader(StreamReader):
    """A rank takes as many samples in a step as its part of a global batch has; a stream that ends
    starts over. The answer contains the state after the step, so that a checkpoint holds the
    position of the steps that were taken, not of those that were read ahead."""

    def __init__(self, dataset: Any, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self._beginning = self._state()
        self._was_opened = False

    def _answers_from(self, start: StreamPosition) -> Iterator[StreamStep]:
        self._set_epoch(start.round)
        if start.position or self._was_opened:
            position_of_dataset = start.dataset if start.position else self._beginning
            self._dataset.load_state_dict(copy.deepcopy(position_of_dataset))

        self._was_opened = True

        samples = self._samples_of_rounds(start)
        size = self._sharding.batch_size
        for position in count(start.position, size):
            # Every step is full: to a plan the epoch is infinite.
            plan = plan_step(
                Cursor(0, position), length=position + size + 1, sharding=self._sharding
            )
            taken = list(islice(samples, plan.local_size))

            batches = []
            for span in plan.spans:
                first = span.low - plan.local_range[0] if span.counts else 0
                part = taken[first : first + span.high - span.low]
                batches.append(self._collate([entry.sample for entry in part]))

            digest = content_hash(taken[0].sample).hex() if position == start.position else ""
            last = taken[-1]
            state = StreamPosition(plan.stop, last.round, last.number, self._state())
            yield StreamStep(plan, batches, digest, state)

    def _samples_of_rounds(self, start: StreamPosition) -> Iterator[_TakenSample]:
        """Samples without end."""
        taken = start.taken
        for round in count(start.round):
            for sample in self._samples(
                self._seed,
                _RANK_SEEDS,
                self._sharding.rank,
                round,
                position=taken,
            ):
                taken += 1
                yield _TakenSample(sample, round, taken)

            if taken == 0:
                raise DataError(
                    f"the stream {self._name} is empty in round {round} on rank {self._sharding.rank}",
                    next_step="check what it reads on this rank, and that its __iter__ starts over after its end",
                )

            taken = 0
            self._set_epoch(round + 1)

    def _state(self) -> Any:
        # A copy: a dataset may return a dict that it continues to change.
        return copy.deepcopy(self._dataset.state_dict())


def read_stream(producer: BatchProducer, start: Any) -> Iterator[Any]:
    """The answers of the producer's reader from `start` on, without end: it continues with the next
    epoch."""
    for answer in producer.batches(chain([start], repeat(None))):
        if isinstance(answer, DataError):
            raise answer
        yield answer
