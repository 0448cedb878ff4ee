"""Evaluation batches on the device: each sample exactly once over all ranks, in order, never
augmented.

The content of a batch does not depend on the world size, so sums over batches, added up by batch
number, do not either. Every rank reads all of a stream, and keeps its own batches; their number is
known after a complete pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from drumline.base.errors import DataError, UsageError
from drumline.data.dataset import BatchRequest, check_stream, content_hash
from drumline.data.delivery import Delivery, to_device
from drumline.data.loader import observed
from drumline.data.sharding import Sharding
from drumline.data.stream_readers import StreamReader, UnknownLengthError, read_stream
from drumline.data.workers import BatchProducer, LoadingOptions, batch_maker_for
from drumline.watch.heartbeat import LoopHeartbeats

_STREAM_SEEDS = (0, 0xE7A1)  # the same each time: evaluation must not depend on the seed of the run


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
        self, dataset: Any, *, sharding: Sharding, device: torch.device, options: LoadingOptions
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
        requests = [
            BatchRequest(
                0, number * size, min((number + 1) * size, self.num_samples), shuffled=False
            )
            for number in self._numbers
        ]
        sizes = [request.high - request.low for request in requests]
        numbers = list(self._numbers)
        if padded and _has_fewer(self._sharding, self.num_batches):
            requests.append(BatchRequest(0, 0, 1, shuffled=False))
            sizes.append(0)
            numbers.append(-1)
        batches = self._delivery.batches(self._producer.batches(requests))
        # Up to the end of `batches`, which ends its workers.
        for number, batch_size, data in zip(numbers, sizes, batches, strict=True):
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
        self, dataset: Any, *, sharding: Sharding, device: torch.device, options: LoadingOptions
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
