"""Batches in the order they were asked for, made in this process or ahead of time by worker processes.

Worker processes are torch's DataLoader. They end with `close`, with the garbage collection of their stream,
or at the latest with the process that started them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from drumline.data.fetch import Fetch
from drumline.data.transfer import pin
from drumline.data.workers import end_workers, fork_context, prepare_worker, told_of_dead_workers


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How batches are made: by whom, how far ahead, and out of which samples."""

    workers: int = 0
    """Processes; 0: the training process itself."""
    pin_memory: bool = True
    """Page-locked memory, where the device is a GPU."""
    persistent_workers: bool = True
    """Whether processes stay from one sequence of batches to the next."""
    prefetch_factor: int = 2
    """Batches that each process prepares ahead."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples; None: torch's own way."""


def fetch_for(dataset: Any, loading: Loading, device: torch.device, *, seed: int) -> Fetch:
    """What makes the batches of a dataset for this device. The CPU has nothing to gain from a batch in two parts, and a
    worker can make the whole of it."""
    on_gpu = device.type == "cuda"
    return Fetch(
        dataset,
        seed=seed,
        collate=loading.collate,
        leaves_rest=on_gpu,
        # A worker has no page-locked memory: what it sends goes there in this process.
        pinned=on_gpu and loading.pin_memory and loading.workers == 0,
    )


class BatchServer:
    """Answers a sequence of requests, one batch for each; one sequence at a time. `fetch[request]` makes a batch."""

    def __init__(self, fetch: Dataset[Any], loading: Loading, device: torch.device) -> None:
        self.outlives_a_sequence = loading.workers == 0 or loading.persistent_workers
        self._fetch = fetch
        self._workers = loading.workers
        self._pin_memory = loading.pin_memory and device.type == "cuda"
        self._prefetch_factor = loading.prefetch_factor
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = None
        self._running: list[Any] = []
        weakref.finalize(self, end_workers, self._running, os.getpid())

    def batches(self, requests: Iterable[Any]) -> Iterator[Any]:
        """The answer to each request. A sequence that was not finished is given up."""
        if self._workers == 0:
            return self._batches_made_here(requests)
        if not self.outlives_a_sequence:
            self.close()
        self._requests.pending = requests
        if self._loader is None:
            self._loader = self._make_loader()
        self._running[:] = [iter(self._loader)]
        return told_of_dead_workers(self._running[0])

    def close(self) -> None:
        """End the worker processes, if there are any. A later call of `batches` would start new ones."""
        self._loader = None
        end_workers(self._running, os.getpid())

    def _batches_made_here(self, requests: Iterable[Any]) -> Iterator[Any]:
        for request in requests:
            batch = self._fetch[request]
            yield pin(batch) if self._pin_memory else batch

    def _make_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._fetch,
            sampler=self._requests,
            batch_size=None,  # a request is already a whole batch
            collate_fn=_as_it_is,
            num_workers=self._workers,
            pin_memory=self._pin_memory,
            persistent_workers=self.outlives_a_sequence,
            prefetch_factor=self._prefetch_factor,
            # Children of this very process: they end by themselves when it is gone, even by kill -9. Workers of a fork
            # server, Python 3.14's default, would have the server for a parent and stay.
            multiprocessing_context=fork_context(),
            worker_init_fn=prepare_worker,
            # Without one of its own the DataLoader draws a number from the training process's generator.
            generator=torch.Generator(),
        )


class _Requests:
    """The sampler of the DataLoader; it is asked anew for each sequence, while the workers stay."""

    pending: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pending)


def _as_it_is(batch: Any) -> Any:
    return batch
