"""Batches on their way to the step: made in the order of their requests, in the training process or
ahead of time by DataLoader workers; then copied to the device ahead of the step that needs them, or
picked from data that stays there.

What workers add to torch: one that hangs in `fork` is forked again; signals for the rank do not end
them; one that dies is named; ending them cannot hang.

On a GPU two batches are kept ahead: their copies and their second part (`finish`) run on a separate
CUDA stream, in parallel with the step. There is no thread: the next batch is made when one is
taken, while the device is still busy with the previous step. On the CPU nothing is made ahead and
nothing is copied.

With `--data.resident` all rows are gathered once, before the first step. A batch is then picked
from them on the device, and only indices and random choices are copied.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drumline.base.errors import TrainingError, UsageError, log
from drumline.base.processes import read_stat
from drumline.data.dataset import (
    BatchMaker,
    TwoPartDataset,
    checked_length,
    is_in_two_parts,
    is_stream,
)
from drumline.data.sharding import Draws
from drumline.rank.torch_internals import (
    abandon_workers,
    forget_persistent_workers,
    shut_down_workers,
    worker_processes,
)

FORK_ATTEMPTS = 5
STUCK_AFTER_S = 1.0  # asleep without a break, in code that never sleeps
POLL_EVERY_S = 0.05
NUM_AHEAD = 2
_FIRST = np.zeros(1, dtype=np.int64)
_CHUNK_BYTES = 1 << 26
MOST_OF_FREE = 0.9  # of the free memory: the model and its activations need room too


# Made


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """The number of workers, how far ahead they work, and how samples are collated."""

    workers: int = 0
    """Worker processes; 0: the training process itself."""

    pin_memory: bool = True
    """Whether batches are in page-locked memory, if the device is a GPU."""

    persistent_workers: bool = True
    """Whether processes stay alive from one sequence of batches to the next."""

    prefetch_factor: int = 2
    """Batches that each process prepares ahead."""

    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples; None: torch's default."""


def batch_maker_for(
    dataset: Any,
    options: LoadingOptions,
    device: torch.device,
    *,
    seed: int,
) -> BatchMaker:
    """What makes the batches of a dataset for this device. On the CPU a batch in two parts has no
    advantage, and a worker can make the whole batch."""
    on_gpu = device.type == "cuda"
    return BatchMaker(
        dataset,
        seed=seed,
        collate=options.collate,
        defer_finish=on_gpu,
        # A worker has no page-locked memory: its batches are pinned in this process.
        pinned=on_gpu and options.pin_memory and options.workers == 0,
    )


class BatchProducer:
    """Makes `maker[request]` for each of a sequence of requests; one sequence at a time.

    Its workers end with `close`, with its garbage collection, or at the latest with the process
    that started them.
    """

    def __init__(self, maker: Dataset[Any], options: LoadingOptions, device: torch.device) -> None:
        self.is_persistent = options.workers == 0 or options.persistent_workers
        self._maker = maker
        self._pin_memory = options.pin_memory and device.type == "cuda"
        self._requests = _RequestSampler()
        self._loader: DataLoader[Any] | None = None

        if options.workers:
            self._loader = DataLoader(
                maker,
                sampler=self._requests,
                batch_size=None,  # a request is already a whole batch
                collate_fn=lambda batch: batch,
                num_workers=options.workers,
                pin_memory=self._pin_memory,
                persistent_workers=self.is_persistent,
                prefetch_factor=options.prefetch_factor,
                # Children of this process end with it, even by kill -9. Workers of a fork server,
                # Python 3.14's default, would be the server's children and continue.
                multiprocessing_context=_ForkContext(),
                worker_init_fn=_prepare_worker,
                # Otherwise the DataLoader would draw a number from the training process's
                # generator.
                generator=torch.Generator(),
            )

        self._running: list[Any] = []
        weakref.finalize(self, end_workers, self._running, os.getpid())

    def batches(self, requests: Iterable[Any]) -> Iterator[Any]:
        """The batch of each request. An earlier sequence that was not finished is dropped."""
        if self._loader is None:
            made = (self._maker[request] for request in requests)
            return map(pin, made) if self._pin_memory else made

        if not self.is_persistent:
            self.close()

        self._requests.pending = requests

        # Uncollected garbage of this process may hold CUDA memory or events, and a forked process
        # that frees them aborts: a worker starts with its garbage collector off, and first freezes
        # the objects that it inherited.
        collects = gc.isenabled()
        gc.disable()

        try:
            self._running[:] = [iter(self._loader)]
        finally:
            if collects:
                gc.enable()

        return _with_dead_workers_named(self._running[0])

    def close(self) -> None:
        """End the worker processes, if there are any. A later call of `batches` would start new
        ones."""
        if self._loader is not None:
            forget_persistent_workers(self._loader)
            # so that new workers get the same seeds
            self._loader.generator = torch.Generator()
        end_workers(self._running, os.getpid())


class _RequestSampler:
    """The sampler of the DataLoader, iterated once per sequence while the workers stay."""

    pending: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pending)


class _ForkedWorker(ForkProcess):
    """A child that reports when it runs Python, and is forked again if it never does.

    On Python 3.11 a child hangs in `fork` if a C++ thread (gloo's, NCCL's) is in
    `PyThreadState_New` at that moment: the thread holds a lock of the interpreter, which the child
    waits for forever. No code before the fork can prevent that, since the thread does not hold the
    GIL. Python 3.12 takes the lock first.
    """

    _ready: tuple[int, int]

    def run(self) -> None:
        """In the child."""
        os.write(self._ready[1], b".")
        for end in self._ready:
            os.close(end)
        super().run()

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:  # noqa: N802 - what multiprocessing calls to fork
        assert isinstance(process_obj, _ForkedWorker)
        for attempt in range(1, FORK_ATTEMPTS + 1):
            process_obj._ready = os.pipe()
            try:
                child = Popen(process_obj)
                # The last child is always kept: if it sleeps every time, this race is not the
                # reason.
                if attempt == FORK_ATTEMPTS or _has_left_fork(child.pid, process_obj._ready[0]):
                    return child
            finally:
                for end in process_obj._ready:
                    os.close(end)

            child.kill()
            child.wait()
            child.close()
            log.warning(
                f"DataLoader worker {child.pid} hung in fork (fixed in Python 3.12) and was forked again"
            )

        raise AssertionError


class _ForkContext(ForkContext):
    if sys.version_info < (3, 12):
        Process = _ForkedWorker


def _has_left_fork(pid: int, ready: int) -> bool:
    """False: it has slept for too long; a child that waits for a core or the disk is not in state
    S."""
    last_ticks = -1
    since = time.monotonic()
    while not wait([ready], timeout=POLL_EVERY_S):
        stat = read_stat(pid)
        if stat is None or stat.state == "Z":
            return True  # a system without /proc, or it has exited: the DataLoader reports how

        if stat.state != "S" or stat.cpu_ticks != last_ticks:
            last_ticks = stat.cpu_ticks
            since = time.monotonic()
        elif time.monotonic() - since >= STUCK_AFTER_S:
            return False

    return True


def _prepare_worker(worker: int) -> None:
    """Run by each worker when it starts."""
    gc.freeze()
    gc.enable()

    # torchrun, Slurm and Ctrl-C signal the whole process group. The rank decides what to do: it may
    # finish its step and save, and needs its workers for that.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _with_dead_workers_named(iterator: Any) -> Iterator[Any]:
    """The same batches. When a worker is killed, mostly because memory ran out, reading its last
    message may raise any error; it is replaced by one that names the worker."""
    try:
        yield from iterator
    except (OSError, EOFError, RuntimeError) as error:
        processes = worker_processes(iterator)

        # torch's own notice of the death, by a signal, may come at any moment.
        with suppress(RuntimeError):
            exited = wait([process.sentinel for process in processes], timeout=0.5)
            for process in processes:
                if process.sentinel in exited:
                    process.join(timeout=0.5)

        dead = [process for process in processes if process.exitcode]
        if not dead:
            raise

        names = ", ".join(f"{process.pid} (exit code {process.exitcode})" for process in dead)
        raise TrainingError(
            f"DataLoader worker {names} died",
            next_step="look for 'out of memory' in the kernel log (dmesg); use fewer workers or smaller batches",
        ) from error


def end_workers(running: list[Any], owner: int) -> None:
    """End the workers of these DataLoader iterators, if this process (and not a forked copy of it)
    owns them."""
    while running and os.getpid() == owner:
        iterator = running.pop()
        processes = worker_processes(iterator)
        if any(process.exitcode for process in processes):
            abandon_workers(iterator)
        else:
            shut_down_workers(iterator)

        for process in processes:
            # Stuck in the user's code, it would block the exit of this process.
            if process.is_alive():
                process.kill()
                process.join()


# Copied to the device


class _SentBatch(NamedTuple):
    batch: Any
    arrival: torch.cuda.Event | None
    """None: the batch stays on the host until the consuming stream copies it."""


class Delivery:
    """Copies batches to one device, and finishes them there."""

    def __init__(self, device: torch.device, finish: Callable[[Any], Any]) -> None:
        self._device = device
        self._finish = finish
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def batches(self, made: Iterator[Any]) -> Iterator[Any]:
        """Each batch on the device, in order. An error is raised when its own batch is due."""
        if self._stream is None:
            return map(self.deliver, made)
        return map(self._receive, prefetch(made, self._send, count=NUM_AHEAD))

    def deliver(self, batch: Any) -> Any:
        """One batch, on the current stream."""
        return self._finish(to_device(batch, self._device))

    def _send(self, batch: Any) -> _SentBatch:
        if self._stream is not None and can_change_streams(batch):
            with torch.cuda.stream(self._stream):
                delivered = self.deliver(batch)
                if can_change_streams(delivered):
                    return _SentBatch(delivered, self._stream.record_event())
        return _SentBatch(batch, None)

    def _receive(self, sent: _SentBatch) -> Any:
        if sent.arrival is None:
            return self.deliver(sent.batch)

        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.arrival)

        # The memory belongs to the other stream, which must not reuse it while this one reads it.
        for leaf in leaves(sent.batch):
            if not isinstance(leaf, torch.Tensor) or leaf.is_cuda:
                leaf.record_stream(current)

        return sent.batch


def prefetch(made: Iterator[Any], send: Callable[[Any], Any], *, count: int) -> Iterator[Any]:
    """`send(batch)` for each batch, `count` batches ahead of the one that is taken. An error ends
    the sequence, and is raised when its own batch is due."""
    waiting: deque[Any] = deque()
    error: Exception | None = None
    try:
        for sent in map(send, made):
            waiting.append(sent)
            if len(waiting) > count:
                yield waiting.popleft()
    except Exception as caught:
        error = caught

    while waiting:
        yield waiting.popleft()

    if error is not None:
        raise error


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on the device. Copies from pinned memory do not wait for the device."""
    return map_leaves(batch, lambda leaf: leaf.to(device, non_blocking=True), method="to")


def pin(batch: Any) -> Any:
    """The batch in page-locked memory; tensors that are already there are not copied."""
    return map_leaves(batch, lambda leaf: leaf.pin_memory(), method="pin_memory")


def clone(batch: Any) -> Any:
    """A copy of the batch in new memory."""
    return map_leaves(batch, lambda leaf: leaf.clone(), method="clone")


def can_change_streams(batch: Any) -> bool:
    """Whether every tensor in it has `record_stream`: a user's object may not, or may hide a
    tensor."""
    if hasattr(batch, "to"):
        return hasattr(batch, "record_stream")
    if isinstance(batch, Mapping):
        return all(map(can_change_streams, batch.values()))
    if isinstance(batch, tuple | list):
        return all(map(can_change_streams, batch))
    return batch is None or isinstance(batch, str | bytes | Number | np.generic | np.ndarray)


def leaves(batch: Any) -> list[Any]:
    """What can be moved: tensors, and objects that have `to`."""
    movable: list[Any] = []
    map_leaves(batch, movable.append, method="to")
    return movable


def map_leaves(batch: Any, move: Callable[[Any], Any], *, method: str) -> Any:
    """The same batch with `move` applied to every tensor, and to every other object that has the
    `method`."""
    if isinstance(batch, torch.Tensor) or hasattr(batch, method):
        return move(batch)
    if isinstance(batch, tuple | list):
        values = (map_leaves(value, move, method=method) for value in batch)
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, Mapping):
        return {name: map_leaves(value, move, method=method) for name, value in batch.items()}
    return batch


# Picked from data on the device


def make_resident(
    dataset: Any,
    device: torch.device,
    *,
    workers: int,
    warns: bool,
) -> tuple[Any, int]:
    """The dataset with its rows on the device, and how many workers it still needs. On the CPU it
    is not changed: its arrays are in memory."""
    if device.type == "cpu":
        return dataset, workers

    name = type(dataset).__name__
    if not is_in_two_parts(dataset):
        reason = "is a stream" if is_stream(dataset) else "is not a drumline.TwoPartDataset"
        raise UsageError(
            f"the data cannot stay on {device}: {name} {reason}",
            next_step="leave --data.resident out, or derive the dataset from drumline.TwoPartDataset",
        )

    needed = checked_length(dataset) * _num_bytes(dataset.gather(_FIRST))
    free = torch.cuda.mem_get_info(device)[0]
    if needed > MOST_OF_FREE * free:
        raise UsageError(
            f"{name} takes {needed / 1e9:,.2f} GB, but {device} has {free / 1e9:,.2f} GB free, of which the data may "
            f"use {MOST_OF_FREE:.0%}",
            next_step="leave --data.resident out: batches are copied to the device ahead of the step anyway",
        )

    if workers and warns:
        log.warning(f"the data stays on {device}, so its {workers} workers are not started")

    resident = ResidentDataset(dataset, device)
    torch.cuda.synchronize(device)  # other streams read it
    return resident, 0


class ResidentDataset(TwoPartDataset):
    """The same batches, from rows that are on the device."""

    def __init__(self, dataset: TwoPartDataset, device: torch.device) -> None:
        self._dataset = dataset
        first = dataset.gather(_FIRST)
        length = len(dataset)

        wholes = [
            torch.empty((length, *leaf.shape[1:]), dtype=leaf.dtype, device=device)
            for leaf in leaves(first)
        ]

        # The host holds a part of the rows at a time.
        chunk = max(1, _CHUNK_BYTES // max(1, _num_bytes(first)))
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = dataset.gather(np.arange(start, stop, dtype=np.int64))
            for whole, rows in zip(wholes, leaves(part), strict=True):
                whole[start:stop].copy_(rows)

        in_order = iter(wholes)
        self._rows = map_leaves(first, lambda _: next(in_order), method="to")

    def __len__(self) -> int:
        return len(self._dataset)

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> Tensor:
        return torch.from_numpy(indices)

    def choose(self, draws: Draws | None) -> Any:
        return self._dataset.choose(draws)

    def finish(self, rows: Tensor, choices: Any) -> Any:
        def pick(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, rows)

        return self._dataset.finish(map_leaves(self._rows, pick, method="index_select"), choices)


def _num_bytes(rows: Any) -> int:
    return sum(leaf.nbytes for leaf in leaves(rows))
