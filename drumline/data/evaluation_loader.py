"""Evaluation batches on the device: each sample exactly once over all ranks, in order, never augmented.

What is in a batch does not depend on the world size, so sums over batches, added up by batch number, do not
either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from drumline.data.delivery import Delivery
from drumline.data.fetch import Request
from drumline.data.followed import Follower, followed
from drumline.data.plan import evaluation_batches
from drumline.data.serving import BatchServer, Loading, fetch_for
from drumline.errors import UsageError


class EvaluationBatch(NamedTuple):
    """One batch on the device."""

    number: int
    """Which one it is of the batches of all ranks."""
    size: int
    data: Any


class EvaluationLoader:
    """This rank's evaluation batches; a rank may have fewer than others, or none."""

    digest = ""
    """Ranks have compared samples before the first step."""
    follower: Follower | None = None
    """Of who iterates; who asks for numbers too speaks for himself."""

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
        # The seed matters only to a dataset whose samples are random even in evaluation: they are the same
        # each time.
        fetch = fetch_for(dataset, loading, device, seed=0)
        self.num_samples = fetch.length
        """Over all ranks."""
        self.num_batches = -(-fetch.length // batch_size)
        """Over all ranks."""
        self._plan = evaluation_batches(
            length=fetch.length, batch_size=batch_size, rank=rank, world_size=world_size
        )
        self._server = BatchServer(fetch, loading, device)
        self._delivery = Delivery(device, fetch.finish)

    def __len__(self) -> int:
        """How many batches this rank has."""
        return len(self._plan)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, in order."""
        return followed((batch.data for batch in self.numbered()), self.follower)

    def numbered(self) -> Iterator[EvaluationBatch]:
        """The same, with the number of each batch and its size."""
        requests = (Request(0, low, high, shuffled=False) for _, (low, high) in self._plan)
        batches = self._delivery.batches(self._server.batches(requests))
        for (number, (low, high)), data in zip(self._plan, batches, strict=True):
            yield EvaluationBatch(number, high - low, data)

    def close(self) -> None:
        """End the worker processes."""
        self._server.close()


def check_batch_size(batch_size: int) -> None:
    """Refuse a batch of nothing."""
    if batch_size < 1:
        raise UsageError(
            f"evaluation batches cannot have {batch_size} samples", next_step="set it to 1 or more"
        )
