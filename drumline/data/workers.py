"""Batches in the order of their requests, made in the training process or ahead of time by
DataLoader workers.

What it adds to torch: a worker that hangs in `fork` is forked again; signals for the rank do not
end its workers; a worker that dies is named; ending them cannot hang.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from drumline.base.errors import TrainingError, log
from drumline.base.processes import read_stat
from drumline.data.dataset import BatchMaker
from drumline.data.delivery import pin
from drumline.rank.torch_internals import (
    abandon_workers,
    forget_persistent_workers,
    shut_down_workers,
    worker_processes,
)

FORK_ATTEMPTS = 5
STUCK_AFTER_S = 1.0  # asleep without a break, in code that never sleeps
POLL_EVERY_S = 0.05


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
    dataset: Any, options: LoadingOptions, device: torch.device, *, seed: int
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
        self.num_workers = options.workers
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
                multiprocessing_context=ForkContext()
                if sys.version_info >= (3, 12)
                else _RetryingForkContext(),
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
            self._loader.generator = torch.Generator()  # so that new workers get the same seeds
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


class _RetryingForkContext(ForkContext):
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
        dead = [
            f"{process.pid} (exit code {process.exitcode})"
            for process in processes
            if process.exitcode
        ]
        if not dead:
            raise
        raise TrainingError(
            f"DataLoader worker {', '.join(dead)} died",
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
