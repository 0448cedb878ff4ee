"""Reading a stream on each rank, with randomness that belongs to the position of a sample.

`SharedStreamReader`: every rank reads the whole stream and keeps its own samples, assigned round-robin. A global batch
is the next `batch_size` samples, whatever the number of ranks. `RankStreamReader`: a stream that keeps its own position
(`state_dict`, `load_state_dict`) decides what each rank gets, mostly by rank.

A reader runs in the training process, or ahead of it in one worker process. Several workers would split the stream
among them, and the order of samples would depend on their number.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate

from drumline.data.dataset import content_hash, restored_generators, seed_generators
from drumline.data.draws import hash_integers
from drumline.data.sharding import Cursor, Sharding, StepPlan, own_shards, plan_step
from drumline.data.workers import BatchProducer, LoadingOptions
from drumline.errors import DataError, UsageError, log

END = object()
"""What `StreamPass.take` gives after the last sample."""
_BEGINNING = -1  # the position whose seed `iter` itself is called with
# These set the seeds of streams apart from all others that are made of (seed, ...).
_SHARED_SEEDS = 0xDEA1
_RANK_SEEDS = 0x0A17


class ReadRequest(NamedTuple):
    """A request to a reader for its next answer, from `start` on if that is given."""

    start: Any = None


class StreamStep(NamedTuple):
    """A reader's answer: one optimizer step of this rank."""

    plan: StepPlan
    batches: list[Any]
    """One for each span of the plan."""
    state: Any = None
    """The `StreamPosition` after this step, of a stream that keeps its own position."""
    digest: str = ""
    """Of the first sample; only in the first answer after a start."""


class StreamPosition(NamedTuple):
    """Where one rank is in a stream that keeps its own position. Checkpoints hold it under these names."""

    position: int = 0
    """Samples that all ranks have taken together."""
    round: int = 0
    """How often the stream has started over."""
    taken: int = 0
    """Samples that this rank has taken in this round."""
    dataset: Any = None
    """The dataset's own state; None: its beginning."""


class UnknownLengthError(UsageError, TypeError):
    """The length of a stream is not known. A TypeError too: that is how `list` learns that there is no length."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the length of the stream {name} is not known", next_step="count the batches while you take them"
        )


class StreamPass:
    """One pass over a stream. The global generators are seeded for each sample; the caller restores them."""

    def __init__(self, dataset: Any, *, seeds: tuple[int, ...], position: int = 0) -> None:
        self.position = position
        """Of the next sample."""
        self._name = type(dataset).__name__
        self._seeds = seeds
        seed_generators(hash_integers(*seeds, _BEGINNING))
        self._samples = iter(dataset)

    def take(self) -> Any:
        """The next sample, or `END`."""
        seed_generators(hash_integers(*self._seeds, self.position))
        try:
            sample = next(self._samples)
        except StopIteration:
            self._samples = iter(())  # some iterators would start over
            return END
        except Exception as error:
            error.add_note(f"while reading sample {self.position} of {self._name}")
            raise
        self.position += 1
        return sample


class StreamReader(Dataset[Any]):
    """Answers with this rank's part of each step, or with a DataError, which the training process raises."""

    def __init__(
        self, dataset: Any, *, sharding: Sharding, seed: int, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self._dataset = dataset
        self._name = type(dataset).__name__
        self._sharding = sharding
        self._seed = seed
        self._collate = collate or default_collate
        self._pass: StreamPass

    def __getitem__(self, request: ReadRequest) -> StreamStep | DataError:
        try:
            with restored_generators():
                if request.start is not None:
                    self._open(request.start)
                return self._read(with_digest=request.start is not None)
        except DataError as error:
            return error

    @abstractmethod
    def _open(self, start: Any) -> None: ...

    @abstractmethod
    def _read(self, *, with_digest: bool) -> StreamStep: ...


class SharedStreamReader(StreamReader):
    """Sample number n of a global batch belongs to shard n % (number of shards), so a rank knows which are its own
    before the end of the batch is known. Only the first few samples of a batch are kept on every rank: a batch that
    ends with them is cut into fewer shards."""

    def __init__(self, dataset: Any, *, sharding: Sharding, **settings: Any) -> None:
        super().__init__(dataset, sharding=sharding, **settings)
        self._own = own_shards(sharding.batch_size, sharding)
        # One sample more, and the batch has enough for all its shards. Placeholders are made of the first samples.
        smallest = sharding.min_shard_size
        self._num_kept_by_all = max(smallest, sharding.num_shards * smallest - 1)
        self._epoch = 0
        self._ahead: Any = END  # read, and not yet assigned: END after the last step of an epoch

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        set_epoch(self._dataset, epoch)
        self._pass = StreamPass(self._dataset, seeds=(self._seed, _SHARED_SEEDS, epoch))
        self._ahead = self._pass.take()
        if self._ahead is END:
            raise DataError(
                f"the stream {self._name} is empty in epoch {epoch}",
                next_step="check the path it reads, and that its __iter__ starts from the beginning each time",
            )

    def _open(self, start: Cursor) -> None:
        self._begin(start.epoch)
        for position in range(start.position):
            self._next()
            if self._ahead is END:
                raise DataError(
                    f"the checkpoint is at sample {start.position} of epoch {start.epoch}, "
                    f"but the stream {self._name} ended after {position + 1} samples",
                    next_step="resume with the dataset that the run began with, or start a new run",
                )

    def _next(self) -> Any:
        sample, self._ahead = self._ahead, self._pass.take()
        return sample

    def _read(self, *, with_digest: bool) -> StreamStep:
        if self._ahead is END:
            self._begin(self._epoch + 1)
        start, size = self._pass.position - 1, 0
        kept: dict[int, Any] = {}
        while size < self._sharding.batch_size and self._ahead is not END:
            sample = self._next()
            if size < self._num_kept_by_all or size % self._sharding.num_shards in self._own:
                kept[size] = sample
            size += 1
        length = start + size + (self._ahead is not END)  # of the epoch, as far as it is known
        plan = plan_step(Cursor(self._epoch, start), length=length, sharding=self._sharding)
        batches = [self._collate([kept[number] for number in numbers]) for numbers in _round_robin(plan)]
        return StreamStep(plan, batches, digest=content_hash(kept[0]).hex() if with_digest else "")


def _round_robin(plan: StepPlan) -> Iterator[range]:
    """For each span of a plan the numbers of its samples in the global batch. A plan gives each shard a range of
    positions; assigned round-robin, each shard gets as many."""
    starts: dict[int, int] = {}
    for span in plan.spans:
        if span.counts:
            first = span.low - starts.setdefault(span.shard, span.low)
            yield range(plan.global_size)[span.shard :: plan.num_shards][first : first + span.size]
        else:
            yield range(span.low - plan.start, span.high - plan.start)


class RankStreamReader(StreamReader):
    """A rank takes as many samples in a step as its part of a global batch has; a stream that ends starts over. Its
    state after each step is part of the answer, so that a checkpoint holds the position of the steps that were taken,
    not of those that were read ahead."""

    def __init__(self, dataset: Any, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self._beginning = self._state()
        self._was_opened = False
        self._position = self._round = 0

    def _open(self, start: StreamPosition) -> None:
        self._position = start.position
        set_epoch(self._dataset, start.round)
        if start.position or self._was_opened:
            self._dataset.load_state_dict(copy.deepcopy(start.dataset if start.position else self._beginning))
        self._was_opened = True
        self._begin(start.round, taken=start.taken)

    def _begin(self, round: int, *, taken: int = 0) -> None:
        self._round = round
        seeds = (self._seed, _RANK_SEEDS, self._sharding.rank, round)
        self._pass = StreamPass(self._dataset, seeds=seeds, position=taken)

    def _read(self, *, with_digest: bool) -> StreamStep:
        start, size = self._position, self._sharding.batch_size
        # Every step is full: for a plan the epoch has no end.
        plan = plan_step(Cursor(0, start), length=start + size + 1, sharding=self._sharding)
        samples = [self._next() for _ in range(plan.local_size)]
        self._position = plan.stop
        position = StreamPosition(plan.stop, self._round, self._pass.position, self._state())
        low = plan.local_range[0]
        batches = []
        for span in plan.spans:
            first = span.low - low if span.counts else 0
            batches.append(self._collate(samples[first : first + span.high - span.low]))
        digest = content_hash(samples[0]).hex() if with_digest else ""
        return StreamStep(plan, batches, state=position, digest=digest)

    def _next(self) -> Any:
        while (sample := self._pass.take()) is END:
            if self._pass.position == 0:
                raise DataError(
                    f"the stream {self._name} is empty in round {self._round} on rank {self._sharding.rank}",
                    next_step="check what it reads on this rank, and that its __iter__ starts anew after its end",
                )
            set_epoch(self._dataset, self._round + 1)
            self._begin(self._round + 1)
        return sample

    def _state(self) -> Any:
        # A copy: a dataset may return the very dict that it continues to change.
        return copy.deepcopy(self._dataset.state_dict())


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call the dataset's own `set_epoch`, if it has one."""
    if callable(own := getattr(dataset, "set_epoch", None)):
        own(epoch)


def read_requests(start: Any) -> Iterator[ReadRequest]:
    """Requests without end: a reader continues into the next epoch by itself."""
    yield ReadRequest(start)
    while True:
        yield ReadRequest()


def stream_producer(
    reader: Dataset[Any], options: LoadingOptions, device: torch.device, *, warns: bool
) -> BatchProducer:
    """A reader's answers, read ahead by one worker process if the options ask for any."""
    if options.workers > 1 and warns:
        log.warning(
            f"a stream is read by 1 worker, not {options.workers}: several would split it among them, and the order of "
            "its samples would depend on their number"
        )
    return BatchProducer(reader, replace(options, workers=min(options.workers, 1)), device)
