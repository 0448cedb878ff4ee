"""What the profiled steps of a rank use and wait for, which a trace lacks: CPUs, processes, lines
that wait for a CUDA device, and the stacks of Python.

Source lines come without stacks, with which a step of 8.3 ms took 11.2 on an H200: torch warns of
operations that make the host wait, just after each, so a line belongs to the last wait before it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from drumline.base.processes import ThreadTimes, descendants, read_stat, thread_times
from drumline.rank.profiled.stack_sampler import NEW_THREAD, StackSampler
from drumline.runs.profile_files import ProcessUse, StackSamples, WorkerUse

MOST_COMMAND = 100

# What reads a profile takes no more than DOCUMENT_BYTES of a file.
MOST_SYNC_LINES = 10_000
WORKER_NAME = "pt_data_worker"
"""That torch gives the processes of a DataLoader."""

SYNCHRONIZES = "called a synchronizing CUDA operation"
NOT_OF_USER = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    warnings.__file__,
)


class StepObservation:
    """From `__init__` to `stop` the steps are observed."""

    stacks: StackSamples
    cpu: CpuUse | None
    """None: the kernel does not count it."""

    workers: WorkerUse | None
    process: ProcessUse | None
    """The other process that used most."""

    def __init__(self, sampler: StackSampler, *, has_gpu: bool, is_alone: bool) -> None:
        """`is_alone`: no other Python thread competes with the steps."""
        self._cpu_wait = CpuWait()
        self._children = ChildTimes()

        self.syncs = SyncLines()
        self._has_gpu = has_gpu
        if has_gpu:
            self.syncs.start()

        self._sampler = sampler
        self._sampler.start(is_alone=is_alone)

    def stop(self) -> None:
        """All is as before."""
        self.stacks = self._sampler.stop()
        if self._has_gpu:
            self.syncs.stop()

        self.workers, self.process = self._children.use()
        self.cpu = self._cpu_wait.stop()


class CpuUse(NamedTuple):
    """Of a rank, in all profiled steps."""

    waited_s: float
    """How long it waited for a CPU."""

    ran_s: float
    """How long the thread that takes the steps ran on one."""


class CpuWait:
    """How long a rank waited for a CPU: the thread that takes the steps, and the one that waited
    longest of those that it waits for (autograd's, gloo's, those of an operation). Their waits are
    one after the other at worst; to add those of all threads, which wait side by side, would call a
    machine with many cores crowded."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._before = thread_times(os.getpid())

    def stop(self) -> CpuUse | None:
        """None: the kernel does not count it."""
        times = {
            thread: now.since(self._before.get(thread, NEW_THREAD))
            for thread, now in thread_times(os.getpid()).items()
        }

        of_steps = times.pop(self._thread, None)
        if of_steps is None:
            return None

        longest_ns = max((waiting.wait_ns for waiting in times.values()), default=0)
        return CpuUse(
            waited_s=(of_steps.wait_ns + longest_ns) / 1e9,
            ran_s=of_steps.run_ns / 1e9,
        )


class ChildTimes:
    """What the processes that a rank has started use from now on: its DataLoader workers, and
    others."""

    def __init__(self) -> None:
        self._before = self._now()
        self._began_ns = time.monotonic_ns()

    def use(self) -> tuple[WorkerUse | None, ProcessUse | None]:
        """Of the workers, and of the other process that used most. Those that have not been there
        from the beginning are left out."""
        lasts_ns = time.monotonic_ns() - self._began_ns
        uses = []
        for pid, now in self._now().items():
            if pid not in self._before:
                continue

            used = now.since(self._before[pid])
            uses.append(ProcessUse(_name_of(pid), used.run_ns / lasts_ns, used.wait_ns / lasts_ns))

        workers = [use for use in uses if use.name == WORKER_NAME]
        processes = [use for use in uses if use.name != WORKER_NAME]
        busiest = max(processes, key=lambda use: use.cores + use.waiting, default=None)

        if not workers:
            return None, busiest

        cores = sum(use.cores for use in workers)
        waiting = sum(use.waiting for use in workers)
        return WorkerUse(number=len(workers), cores=cores, waiting=waiting), busiest

    def _now(self) -> dict[int, ThreadTimes]:
        """Of the main thread of each, which makes the batches."""
        return {pid: thread_times(pid).get(pid, NEW_THREAD) for pid in descendants(os.getpid())}


def _name_of(pid: int) -> str:
    """That of a worker, a process of multiprocessing, or a command."""
    stat = read_stat(pid)
    if stat is None or stat.name == WORKER_NAME:
        return WORKER_NAME

    names = {child.pid: child.name for child in multiprocessing.active_children()}

    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        names.setdefault(pid, command.replace("\0", " ")[:MOST_COMMAND].strip())

    return names.get(pid, stat.name)


class SyncLines:
    """Records the source lines of what makes the host wait for a CUDA device: torch warns after an
    operation that does, and its functions that wait are wrapped. A profile with stacks would cost
    far more."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        """Unix time in ns, just after the call, and the line."""

        self._show_warning = warnings.showwarning
        self._waits = [
            (owner, owner.synchronize)
            for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
        ]
        """The functions of torch that wait for a device, and where they are."""

    def start(self) -> None:
        """From here on lines are recorded."""
        self._mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is a prototype
            torch.cuda.set_sync_debug_mode("warn")

        warnings.filterwarnings("always", message=f".*{SYNCHRONIZES}")
        self._filter = warnings.filters[0]
        warnings.showwarning = self._on_warning  # type: ignore[assignment]

        for owner, wait in self._waits:
            setattr(owner, "synchronize", self._noting(wait))  # noqa: B010 - a module or a class

    def stop(self) -> None:
        """All is as before `start`; what the script has meanwhile changed of its warnings stays."""
        torch.cuda.set_sync_debug_mode(self._mode)
        with suppress(ValueError):  # the script has removed all filters
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

        if warnings.showwarning == self._on_warning:
            warnings.showwarning = self._show_warning

        for owner, wait in self._waits:
            setattr(owner, "synchronize", wait)  # noqa: B010

    def _noting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """The function that waits, which then notes the line that called it."""

        @functools.wraps(wait)
        def synchronize(*args: Any, **kwargs: Any) -> Any:
            result = wait(*args, **kwargs)
            self._note(sys._getframe(1))
            return result

        return synchronize

    def _on_warning(self, message: Any, *context: Any) -> None:
        """Note torch's warnings of waits, and show all others as before."""
        if SYNCHRONIZES in str(message):
            self._note(sys._getframe(1))
        else:
            self._show_warning(message, *context)

    def _note(self, frame: FrameType | None) -> None:
        """Record the innermost line that is not torch's or Python's own."""
        while frame is not None and frame.f_code.co_filename.startswith(NOT_OF_USER):
            frame = frame.f_back

        if frame is not None and len(self.lines) < MOST_SYNC_LINES:
            self.lines.append((time.time_ns(), f"{frame.f_code.co_filename}:{frame.f_lineno}"))
