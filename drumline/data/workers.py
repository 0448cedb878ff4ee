"""The life and death of DataLoader worker processes, where torch leaves something to be wished for.

Signals for the rank do not end its workers; a worker that dies is named; ending them cannot hang. The only
file that uses private parts of torch's DataLoader.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data._utils import signal_handling

from drumline.errors import TrainingError


def leave_signals_to_the_rank(worker: int) -> None:
    """Run by each worker when it starts."""
    # torchrun, Slurm and a terminal's Ctrl-C signal the whole process group. What follows is for the rank to
    # decide: it may want to finish its step and save, and needs its workers for that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def told_of_dead_workers(iterator: Any) -> Iterator[Any]:
    """The same batches. A worker that is killed, most often for want of memory, leaves behind whatever error its last
    message breaks off with; what happened is said instead."""
    try:
        yield from iterator
    except (OSError, EOFError, RuntimeError) as error:
        if not (dead := _dead_among(iterator._workers)):
            raise
        raise TrainingError(
            f"DataLoader worker {', '.join(dead)} died",
            next_step="look for 'out of memory' in the kernel log (dmesg); use fewer workers or smaller batches",
        ) from error


def end_workers(running: list[Any], owner: int) -> None:
    """End the workers of these DataLoader iterators, if this process (and not a forked copy of it) owns them."""
    while running and os.getpid() == owner:
        iterator = running.pop()
        if any(process.exitcode for process in iterator._workers):
            _give_up(iterator)
        else:
            iterator._shutdown_workers()  # what torch does itself when the iterator is garbage-collected
        for process in iterator._workers:
            if process.is_alive():  # stuck in the user's code: it would keep this process from ending
                process.kill()
                process.join()


def _dead_among(processes: list[Any]) -> list[str]:
    with suppress(RuntimeError):  # torch's own notice of the death, by a signal, may come at any moment
        gone = wait([process.sentinel for process in processes], timeout=0.5)
        for process in processes:
            if process.sentinel in gone:
                process.join(timeout=0.5)
    return [f"{process.pid} (exit code {process.exitcode})" for process in processes if process.exitcode]


def _give_up(iterator: Any) -> None:
    """Do without torch's shutdown, now and when the iterator is garbage-collected: it would wait for ever for a lock
    that a worker held when it was killed."""
    iterator._shutdown = True
    signal_handling._remove_worker_pids(id(iterator))  # no more notices of their deaths
    iterator._worker_pids_set = False
    if hasattr(iterator, "_pin_memory_thread_done_event"):
        iterator._pin_memory_thread_done_event.set()
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
        queue.close()
