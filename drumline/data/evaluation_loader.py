"""Evaluation batches on the device: each sample exactly once over all ranks, in order, never augmented.

What is in a batch does not depend on the world size, so sums over batches, added up by batch number, do not either.
Every rank reads all of a stream, and keeps its own batches; how many there are is known after a whole pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate

from drumline.data.dataset import BatchRequest, check_stream, content_hash, is_stream, restored_generators
from drumline.data.delivery import Delivery, to_device
from drumline.data.sharding import evaluation_batches
from drumline.data.steps import LoaderObserver, observed
from drumline.data.stream_readers import (
    END,
    ReadRequest,
    StreamPass,
    UnknownLengthError,
    read_requests,
    set_epoch,
    stream_producer,
)
from drumline.data.workers import BatchProducer, LoadingOptions, batch_maker_for
from drumline.errors import DataError, UsageError

_STREAM_SEEDS = (0, 0xE7A1)  # the same each time: evaluation must not depend on the seed of the run


class EvaluationBatch(NamedTuple):
    """One batch on the device."""

    number: int
    """Which one it is of the batches of all ranks."""
    size: int
    data: Any


class EvaluationLoader(ABC):
    """This rank's evaluation batches; a rank may have fewer than others, or none."""

    num_samples: int | None = None
    """Over all ranks; None: not known before a whole pass over a stream."""
    digest: str = ""
    """Of the first sample of the latest pass over a stream; other datasets are compared before the first step."""
    observer: LoaderObserver | None = None
    """Notified while a user's loop iterates; the engine, which uses `numbered`, reports for itself."""
    _producer: BatchProducer

    def __init__(self, dataset: Any, *, batch_size: int, device: torch.device) -> None:
        if batch_size < 1:
            raise UsageError(f"evaluation batches cannot have {batch_size} samples", next_step="set it to 1 or more")
        self._name = type(dataset).__name__
        self._batch_size = batch_size
        self._device = device

    @property
    def num_batches(self) -> int:
        """Over all ranks."""
        if self.num_samples is None:
            raise UnknownLengthError(self._name)
        return -(-self.num_samples // self._batch_size)

    @abstractmethod
    def __len__(self) -> int:
        """How many batches this rank has."""

    @abstractmethod
    def numbered(self) -> Iterator[EvaluationBatch]:
        """This rank's batches in order, with the number of each and its size."""

    def __iter__(self) -> Iterator[Any]:
        """The same without numbers."""
        return observed((batch.data for batch in self.numbered()), self.observer)

    def close(self) -> None:
        """End the worker processes."""
        self._producer.close()


class IndexedEvaluationLoader(EvaluationLoader):
    """Of a dataset with samples by index, or whole batches."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        options: LoadingOptions,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, device=device)
        # The seed matters only to a dataset whose samples are random even in evaluation: they are the same each time.
        maker = batch_maker_for(dataset, options, device, seed=0)
        self.num_samples = maker.length
        self._plan = evaluation_batches(length=maker.length, batch_size=batch_size, rank=rank, world_size=world_size)
        self._producer = BatchProducer(maker, options, device)
        self._delivery = Delivery(device, maker.finish)

    def __len__(self) -> int:
        return len(self._plan)

    def numbered(self) -> Iterator[EvaluationBatch]:
        requests = (BatchRequest(0, low, high, shuffled=False) for _, (low, high) in self._plan)
        batches = self._delivery.batches(self._producer.batches(requests))
        for (number, (low, high)), data in zip(self._plan, batches, strict=True):
            yield EvaluationBatch(number, high - low, data)


class _EndOfPass(NamedTuple):
    """A reader's last answer."""

    num_samples: int
    first: str
    """A digest of the first sample."""


class _EvaluationReader(Dataset[Any]):
    """Answers with this rank's batches one by one, and at the end with the number of samples that all ranks have."""

    def __init__(
        self, dataset: Any, *, batch_size: int, rank: int, world_size: int, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._collate = collate or default_collate
        self._pass: StreamPass
        self._first = ""

    def __getitem__(self, request: ReadRequest) -> EvaluationBatch | _EndOfPass:
        with restored_generators():
            if request.start is not None:
                set_epoch(self._dataset, 0)
                self._pass = StreamPass(self._dataset, seeds=_STREAM_SEEDS)
            return self._read()

    def _read(self) -> EvaluationBatch | _EndOfPass:
        samples: list[Any] = []
        while len(samples) < self._batch_size:
            number = self._pass.position // self._batch_size
            if (sample := self._pass.take()) is END:
                break
            if self._pass.position == 1:
                self._first = content_hash(sample).hex()
            if number % self._world_size == self._rank:
                samples.append(sample)
        if not samples:
            return _EndOfPass(self._pass.position, self._first)
        number = (self._pass.position - 1) // self._batch_size
        return EvaluationBatch(number, len(samples), self._collate(samples))


class StreamEvaluationLoader(EvaluationLoader):
    """Of a stream."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        options: LoadingOptions,
    ) -> None:
        super().__init__(dataset, batch_size=batch_size, device=device)
        check_stream(dataset)
        self._is_persistent = options.persistent_workers
        reader = _EvaluationReader(
            dataset, batch_size=batch_size, rank=rank, world_size=world_size, collate=options.collate
        )
        # No warning of workers: the loader of the training data has made it.
        self._producer = stream_producer(reader, options, device, warns=False)

    def __len__(self) -> int:
        raise UnknownLengthError(self._name)

    def numbered(self) -> Iterator[EvaluationBatch]:
        for answer in self._producer.batches(read_requests(True)):
            if isinstance(answer, _EndOfPass):
                self.digest = answer.first
                if not self._is_persistent:
                    self._producer.close()
                if answer.num_samples == 0:
                    raise DataError(
                        f"the stream {self._name} is empty", next_step="check the path and the split it reads"
                    )
                self.num_samples = answer.num_samples
                return
            yield answer._replace(data=to_device(answer.data, self._device))


def make_evaluation_loader(dataset: Any, **settings: Any) -> EvaluationLoader:
    """This rank's evaluation batches, however the dataset is read."""
    return (StreamEvaluationLoader if is_stream(dataset) else IndexedEvaluationLoader)(dataset, **settings)
