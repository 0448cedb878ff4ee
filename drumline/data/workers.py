"""How DataLoader worker processes start and end, where torch is not strict enough.

One that hangs in `fork` is forked again; signals for the rank do not end its workers; a worker that dies is named;
ending them cannot hang. The only file that uses private parts of torch's DataLoader.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.utils.data._utils import signal_handling

from drumline.errors import TrainingError
from drumline.log import log

FORK_ATTEMPTS = 5
STUCK_AFTER_S = 1.0
"""Asleep without a break, in code that never sleeps."""
LOOK_EVERY_S = 0.05


class _ForkedWorker(ForkProcess):
    """A child that reports when it runs Python, and is forked again if it never does.

    On Python 3.11 a child hangs in `fork` if a C++ thread (gloo's, NCCL's) is in `PyThreadState_New` at that moment:
    the thread holds a lock of the interpreter, and the child, which has no such thread, waits for it. Nothing that
    Python can do before a fork keeps that thread out, since it does not hold the GIL. Python 3.12 takes the lock first.
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
                # The last one is left to itself: whatever it sleeps in comes every time, so it is no such race.
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


class _ForkAgain(ForkContext):
    Process = _ForkedWorker


def fork_context() -> ForkContext:
    """How a DataLoader starts its workers."""
    return ForkContext() if sys.version_info >= (3, 12) else _ForkAgain()


def _has_left_fork(pid: int, ready: int) -> bool:
    """False: it has slept for long, and without a break; one that waits for a core or the disk does not sleep."""
    last, since = "", time.monotonic()
    while not wait([ready], timeout=LOOK_EVERY_S):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return True  # no such file on this system: nothing to judge by
        fields = stat.rpartition(")")[2].split()
        seen, now = f"{fields[0]} {fields[11]} {fields[12]}", time.monotonic()  # state, CPU time
        if fields[0] != "S" or seen != last:
            last, since = seen, now
        elif now - since >= STUCK_AFTER_S:
            return False
        if fields[0] == "Z":
            return True  # what ended it is for the DataLoader to report
    return True


def prepare_worker(worker: int) -> None:
    """Run by each worker when it starts."""
    # What the rank has not collected yet may hold a CUDA event; to free one in a forked process aborts it.
    gc.freeze()
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
