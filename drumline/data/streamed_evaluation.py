"""Evaluation batches of a stream: every rank reads all of it from the beginning, and keeps the batches that are its.

What is in a batch does not depend on the world size, as with an `EvaluationLoader`. How many batches there are is known
when a pass is through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate

from drumline.data.dataset import check_stream
from drumline.data.evaluation_loader import EvaluationBatch, check_batch_size
from drumline.data.fetch import generators_put_back
from drumline.data.fingerprint import content_hash
from drumline.data.followed import Follower, followed
from drumline.data.serving import Loading
from drumline.data.streamed import END, Ask, NoLengthError, Pass, asks_from, read_by, tell_epoch
from drumline.data.transfer import to_device
from drumline.errors import DataError

_SEEDS = (0, 0xE7A1)  # the same each time: evaluation is not to depend on the seed of the run


class _ReadAll(NamedTuple):
    """A reader's last answer."""

    num_samples: int
    first: str
    """A digest of the first sample."""


class EvaluationReader(Dataset[Any]):
    """Answers with this rank's batches one by one, and in the end with the number of samples that all ranks have."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._collate = collate or default_collate
        self._pass: Pass
        self._first = ""

    def __getitem__(self, ask: Ask) -> EvaluationBatch | _ReadAll:
        with generators_put_back():
            if ask.opening is not None:
                tell_epoch(self._dataset, 0)
                self._pass = Pass(self._dataset, seeds=_SEEDS)
            return self._read()

    def _read(self) -> EvaluationBatch | _ReadAll:
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
            return _ReadAll(self._pass.position, self._first)
        number = (self._pass.position - 1) // self._batch_size
        return EvaluationBatch(number, len(samples), self._collate(samples))


class StreamEvaluationLoader:
    """This rank's evaluation batches of a stream; a rank may have fewer than others, or none."""

    num_samples: int | None = None
    """Over all ranks; None: no pass is through yet."""
    digest: str = ""
    """Of the first sample of the latest pass."""
    follower: Follower | None = None
    """See EvaluationLoader."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        loading: Loading,
    ) -> None:
        check_batch_size(batch_size)
        check_stream(dataset)
        self._name = type(dataset).__name__
        self._batch_size = batch_size
        self._device = device
        self._stays = loading.persistent_workers
        self._server = read_by(
            EvaluationReader(
                dataset, batch_size=batch_size, rank=rank, world_size=world_size, collate=loading.collate
            ),
            loading,
            device,
            warns=False,  # what is to be said of workers was said of the training data
        )

    @property
    def num_batches(self) -> int:
        """Over all ranks, once a pass is through."""
        if self.num_samples is None:
            raise NoLengthError(self._name)
        return -(-self.num_samples // self._batch_size)

    def __len__(self) -> int:
        raise NoLengthError(self._name)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, in order."""
        return followed((batch.data for batch in self.numbered()), self.follower)

    def numbered(self) -> Iterator[EvaluationBatch]:
        """The same, with the number of each batch and its size."""
        for answer in self._server.batches(asks_from(True)):
            if isinstance(answer, _ReadAll):
                self.digest = answer.first
                self._note(answer.num_samples)
                return
            yield answer._replace(data=to_device(answer.data, self._device))

    def close(self) -> None:
        """End the worker process."""
        self._server.close()

    def _note(self, num_samples: int) -> None:
        if not self._stays:
            self._server.close()
        if num_samples == 0:
            raise DataError(
                f"the stream {self._name} is empty", next_step="check the path and the split it reads"
            )
        self.num_samples = num_samples
