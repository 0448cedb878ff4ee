"""torch.profiler over some steps of one rank: the trace, and the facts that it lacks, as files of a
profile.

Source lines come without stacks, with which a step of 8.3 ms took 11.2 on an H200: torch warns of
operations that make the host wait, just after each, so a line belongs to the last wait before it.
"""

from __future__ import annotations

import functools
import gzip
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from drumline.base.processes import ThreadTimes, descendants, read_stat, thread_times
from drumline.base.rank_environment import Topology
from drumline.base.startup import quiet_profiler
from drumline.base.text import MIB, print_message
from drumline.base.untrusted import make_own_folder, replace_bytes, replacing
from drumline.rank.collectives import gather_json, gather_on_main
from drumline.rank.torch_internals import (
    ddp_measurements,
    names_ignored_by_ddp,
    recorded_collectives,
    uses_gloo,
)
from drumline.rank.watched.other_profilers import OtherProfilers
from drumline.rank.watched.slow_modes import SlowModes, python_tracers
from drumline.rank.watched.stack_sampler import (
    BUSY_THREAD,
    NEW_THREAD,
    Phases,
    StackSampler,
    code_of,
    other_threads_ns,
    phases_of_torch,
)
from drumline.rank.watched.step_inspection import StepInspection
from drumline.runs.profile_files import (
    DATA_MARK,
    END_MARK,
    FEWEST_TIMED,
    MERGED_FILE,
    PROFILE_FILE,
    STEP_MARK,
    JobFacts,
    OptimizerFacts,
    Pause,
    ProcessUse,
    RankFacts,
    StackSamples,
    WastedWork,
    WorkerUse,
    facts_path,
    trace_path,
    write_facts,
)

T = TypeVar("T")
_END = object()
MOST_SYNC_LINES = 10_000
MOST_PAUSES = 5_000
MOST_COMMAND = 100
WORKER_NAME = "pt_data_worker"
"""That torch gives the processes of a DataLoader."""
MOST_OPEN_S = 10.0
"""For so long the end of a profile waits for collectives that are still open."""
POLL_S = 0.02
LATER_S = 1.0
"""How often a profiler that could not be stopped is tried again."""
UNSTOPPED: list[Any] = []
"""Profilers that were not stopped: gloo's threads may still write into their memory."""
SYNCHRONIZES = "called a synchronizing CUDA operation"
TORCH = str(Path(torch.__file__).parent)


class TraceCapture:
    """Call `begin_step` at the start of every step until `is_done`. Steps before the first one that
    is profiled are timed, to know what profiling costs; in the last of them the profiler warms
    up. Where the user's code has profilers or modes that slow each operation, half of the steps
    before are without these, as the profiled ones."""

    def __init__(
        self,
        steps: range,
        folder: Path,
        topology: Topology,
        job: JobFacts,
    ) -> None:
        self._steps = steps
        self._folder = folder
        self._topology = topology
        self._rank = topology.rank
        self._job = job
        self._profiler: Any = None
        self._range: Any = None
        self._number = 0
        self._timed_from: tuple[int, float] | None = None
        """The step from which on steps without the profiler are timed, and when it began."""
        self._unprofiled_s: float | None = None
        self._with_modes_s: float | None = None
        """Of the steps before, with what is off in the others; None: there is none."""
        self._loading_s = 0.0
        """How long the loop waited for batches."""
        self._loading_cpu_s = 0.0
        """The CPU time meanwhile."""
        self._cpu_wait: CpuWait
        self._cpu_use: CpuUse | None = None
        self._sync_lines: SyncLines | None = None
        self._sampler: StackSampler
        self._stacks = StackSamples()
        self._began_s = 0.0
        self._threads_before: dict[int, int] = {}
        """The CPU time of other threads then."""
        self.phases: Phases = {}
        """Where the phases of the loop begin, besides those of torch."""
        self.modules: list[torch.nn.Module] = []
        """Those that are trained: where DDP's buckets are looked for."""
        self.optimizer: torch.optim.Optimizer | None = None
        self.optimizers: Iterable[torch.optim.Optimizer] = []
        """All that take steps, also one inside another one."""
        self.num_optimizers = 1
        self._workers: ChildTimes
        self._worker_use: WorkerUse | None = None
        self._process_use: ProcessUse | None = None
        self._pauses: list[Pause] = []
        self._paused_s = 0.0
        self._others = OtherProfilers()
        self._slow_modes = SlowModes()
        self._inspection: StepInspection | None = None
        self._wasted: tuple[WastedWork, ...] = ()
        self._num_passes: int | None = None
        self._tracers: tuple[str, ...] = ()
        self._backend = "none"
        self._next_try_s = 0.0
        self.is_recording = self.is_done = self._is_written = False

    def begin_step(self, number: int) -> None:
        """Step `number`, counted from 0, begins here."""
        first = self._steps.start
        self._number = number
        if not self._began_s:
            if not self.stop_late():
                self._refuse()
                return
            self._began_s = time.perf_counter()
            self._threads_before = other_threads_ns()
            self._others.observe()
            self._slow_modes.observe()

        if self.is_recording:
            self._range.__exit__(None, None, None)
            if number < self._steps.stop:
                self._mark_step()
            else:
                self._stop()
        elif number == first:
            self._start()
        elif number == first - 1:
            self._prepare()
        elif number == 1:  # the first step compiles, allocates and connects
            self._begin_timing()
        elif number == first // 2 and (self._others.line or self._slow_modes.are_on()):
            self._with_modes_s = self._timed_step_s()
            self._silence()
            self._begin_timing()

    def add_pause(self, reason: str, began_ns: int, ended_ns: int) -> None:
        """After the present step the loop did something else than train."""
        self._paused_s += (ended_ns - began_ns) / 1e9
        if self.is_recording and len(self._pauses) < MOST_PAUSES:
            self._pauses.append(Pause(reason, self._number, began_ns, ended_ns))

    def marked(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; waiting for each is a range in the trace."""
        source = iter(batches)
        while True:
            began_s = time.perf_counter()
            began_cpu_s = time.process_time()
            with record_function(DATA_MARK):
                batch: Any = next(source, _END)
            self._loading_s += time.perf_counter() - began_s
            self._loading_cpu_s += time.process_time() - began_cpu_s
            if batch is _END:
                return
            yield batch

    def finish(self) -> None:
        """The last step has ended: stop, if steps are being profiled."""
        if self.is_recording:
            self._number += 1
            self._range.__exit__(None, None, None)
            self._stop()
        elif not self.is_done:
            self.close()

    def close(self) -> None:
        """What was off is on again, and nothing is recorded any more, also after an error: what has
        been recorded is then discarded."""
        if self._inspection is not None:
            self._inspection.stop()
            self._inspection = None
        if self.is_recording:
            self._range.__exit__(None, None, None)
            self._stop_observing()
            self.is_recording = False
            # collectives may be open, and nothing may block here
            UNSTOPPED.append(self._profiler)
        self._slow_modes.resume()
        if not UNSTOPPED:
            self._others.resume()

    def collect(self) -> None:
        """Collective: rank 0 gets the files of the ranks whose folder it does not see. Most folders
        are shared. A rank that could not write its files calls it too: rank 0 removes what an
        earlier profile left of them. OSError is raised only
        after the last collective, so that no rank waits for another."""
        received = []
        for path in (
            trace_path(self._folder, self._rank),
            facts_path(self._folder, self._rank),
        ):
            files = gather_json(
                (path.name, file_version(path) if self._is_written else None)
            )
            is_seen = gather_json(
                [
                    file_version(self._folder / name) == version
                    for name, version in files
                ]
            )[0]
            is_sent = self._is_written and not is_seen[self._rank]
            content = path.read_bytes() if is_sent else b""
            sent = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[
                : len(content)
            ]
            parts = gather_on_main(sent, gather_json(len(content)))
            received += list(zip(files, is_seen, parts, strict=False))

        for (name, _), is_current, part in received:
            if part.numel():
                replace_bytes(self._folder / name, part.numpy().tobytes())
            elif not is_current:
                (self._folder / name).unlink(missing_ok=True)

    @property
    def _is_gpu(self) -> bool:
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def _now(self) -> float:
        self._synchronize()
        return time.perf_counter()

    def _synchronize(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()

    def _begin_timing(self) -> None:
        """Time the steps from here on."""
        self._timed_from = (self._number, self._now() - self._paused_s)

    def _timed_step_s(self) -> float | None:
        """The mean of these steps; None: they are too few."""
        if self._timed_from is None:
            return None
        number, began_s = self._timed_from
        num_steps = self._number - number
        if num_steps < FEWEST_TIMED:
            return None
        return (self._now() - self._paused_s - began_s) / num_steps

    def _silence(self) -> None:
        """What the user's code has of profilers and slow modes is off."""
        quiet_profiler()
        self._slow_modes.silence()
        self._others.silence()

    def _prepare(self) -> None:
        """In the last step before those that are profiled: load the profiler."""
        self._unprofiled_s = self._timed_step_s()

        activities = [ProfilerActivity.CPU]
        if self._is_gpu:
            activities.append(ProfilerActivity.CUDA)

        # Not with acc_events: torch would make a Python object of every event, for a minute where a
        # step has 20,000 operations.
        self._silence()
        with self._others.ours():
            self._profiler = profile(activities=activities)
            self._profiler.prepare_trace()
        self._inspection = StepInspection(self.modules)
        self._inspection.start()

    def _start(self) -> None:
        """The first profiled step begins."""
        if self._profiler is None:
            self._prepare()
        if dist.is_initialized():  # a script may leave it before its end
            self._backend = dist.get_backend()
        if self._inspection is not None:
            self._wasted = self._inspection.stop()
            self._num_passes = self._inspection.num_passes
            self._inspection = None
        self._synchronize()
        with self._others.ours():
            self._profiler.start_trace()
        self._tracers = python_tracers()
        self._cpu_wait = CpuWait()
        self._workers = ChildTimes()
        if self._is_gpu:
            self._sync_lines = SyncLines()
            self._sync_lines.start()

        marked = {code_of(TraceCapture.marked): "data"}
        self._sampler = StackSampler(
            {**phases_of_torch(), **marked, **self.phases}, self.modules
        )
        self._sampler.start(is_alone=not self._has_busy_thread())
        self._mark_step()
        self.is_recording = True

    def _has_busy_thread(self) -> bool:
        """Whether another Python thread has competed with the steps so far."""
        most_ns = BUSY_THREAD * (time.perf_counter() - self._began_s) * 1e9
        return any(
            cpu_ns - self._threads_before.get(thread, 0) > most_ns
            for thread, cpu_ns in other_threads_ns().items()
        )

    def _refuse(self) -> None:
        """Two profilers of torch cannot record at once: that of the group of nodes before still does."""
        self.is_done = True
        print_message(
            f"rank {self._rank} has no trace: a collective of the nodes before is still open"
        )

    def _mark_step(self) -> None:
        self._range = record_function(f"{STEP_MARK}{self._number}")
        self._range.__enter__()

    def _stop(self) -> None:
        """Every rank stops after the same step, since the next thing that it calls may be
        `collect`."""
        with record_function(END_MARK):
            self._synchronize()
        is_closed = wait_for_collectives()
        self.is_recording = False
        self.is_done = True
        self._stop_observing()
        self._slow_modes.resume()
        self._worker_use, self._process_use = self._workers.use()
        self._cpu_use = self._cpu_wait.stop()
        if is_closed:
            with self._others.ours():
                self._profiler.stop_trace()
            self._others.resume()
            self._write()
        else:
            UNSTOPPED.append(self._profiler)
            self._next_try_s = time.perf_counter() + LATER_S
            print_message(
                f"rank {self._rank} has no trace: a collective was still open {MOST_OPEN_S:g} s after the last "
                "profiled step"
            )

        self._profiler = None

    def _stop_observing(self) -> None:
        """What runs beside the profiler ends."""
        self._stacks = self._sampler.stop()
        if self._sync_lines is not None:
            self._sync_lines.stop()

    def stop_late(self) -> bool:
        """Whether nothing is recorded any more. Call it between steps: a profiler that could not be
        stopped after the last profiled step is stopped when no collective is open, and what it has
        recorded is discarded."""
        if UNSTOPPED and time.perf_counter() >= self._next_try_s:
            if has_open_collectives():
                self._next_try_s = time.perf_counter() + LATER_S
            else:
                with self._others.ours():
                    UNSTOPPED.pop().stop_trace()
                self._others.resume()
        return not UNSTOPPED

    # Files

    def _write(self) -> None:
        """Write the trace, compressed, and the facts."""
        make_own_folder(self._folder)
        if self._rank == 0:  # of earlier steps
            for name in (PROFILE_FILE, MERGED_FILE):
                (self._folder / name).unlink(missing_ok=True)

        target = trace_path(self._folder, self._rank)
        plain = target.with_suffix(".plain")
        self._profiler.export_chrome_trace(str(plain))
        try:
            with (
                plain.open("rb") as source,
                replacing(target) as file,
                gzip.open(file, "wb", compresslevel=1) as packed,
            ):
                shutil.copyfileobj(source, packed, 1 << 20)
        finally:
            plain.unlink()

        write_facts(self._folder, self._facts())
        self._is_written = True

    def _facts(self) -> RankFacts:
        """What this rank knows of its steps that is not in the trace."""
        data = ddp_data(self.modules)
        num_steps = self._number - self._steps.start
        cpu_use = self._cpu_use
        job = self._job
        if not job.settings and (cap := data.get("bucket_cap_bytes")):  # a script's
            job = replace(job, bucket_cap_mb=cap / MIB)
        return RankFacts(
            rank=self._rank,
            world_size=self._topology.world_size,
            host=self._topology.host,
            device=torch.cuda.get_device_name() if self._is_gpu else "cpu",
            backend=self._backend,
            first_step=self._steps.start,
            num_steps=num_steps,
            bucket_bytes=bucket_bytes(data),
            num_models=sum(
                isinstance(part, DistributedDataParallel) for part in self.modules
            ),
            tensor_bytes=tensor_bytes(self.modules, data),
            unprofiled_step_s=self._unprofiled_s,
            slow_modes_s=self._slow_modes_s(),
            cpus=tuple(os.sched_getaffinity(0)),
            host_cpus=os.cpu_count(),
            loading_cores=self._loading_cpu_s / self._loading_s
            if self._loading_s
            else None,
            cpu_wait_s=None
            if cpu_use is None
            else cpu_use.waited_s / max(1, num_steps),
            cpu_run_s=None if cpu_use is None else cpu_use.ran_s / max(1, num_steps),
            pauses=tuple(self._pauses),
            sync_lines=tuple(self._sync_lines.found) if self._sync_lines else (),
            optimizer=self._optimizer_facts(),
            num_optimizers=self.num_optimizers,
            workers=self._worker_use,
            process=self._process_use,
            has_sync_batchnorm=any(
                isinstance(part, torch.nn.SyncBatchNorm)
                for module in self.modules
                for part in module.modules()
            ),
            num_threads=torch.get_num_threads(),
            checks_collectives=dist.get_debug_level() == dist.DebugLevel.DETAIL,
            num_passes=self._num_passes,
            wasted=self._wasted,
            own_profiler=self._others.line,
            slow_modes=tuple(self._slow_modes.names),
            tracers=self._tracers,
            stacks=self._stacks,
            job=job,
        )

    def _slow_modes_s(self) -> float | None:
        """What a step takes longer with them; None: not known, as where they are off from the first
        timed step on."""
        if self._with_modes_s is None or self._unprofiled_s is None:
            return None
        return max(0.0, self._with_modes_s - self._unprofiled_s)

    def _optimizer_facts(self) -> OptimizerFacts | None:
        """What the advice about an optimizer needs to know of it."""
        if self.optimizer is None:
            return None
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        return OptimizerFacts(
            name=type(self.optimizer).__name__,
            num_tensors=len(parameters),
            num_bytes=sum(parameter.nbytes for parameter in parameters),
            is_fused=all(bool(group.get("fused")) for group in groups),
            is_foreach=all(bool(group.get("foreach")) for group in groups),
            unused_gradients=unused_gradients(self.modules, self.optimizers),
        )


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
        now = thread_times(os.getpid())
        if self._thread not in now or self._thread not in self._before:
            return None
        waits_ns = {
            thread: times.wait_ns - self._before.get(thread, NEW_THREAD).wait_ns
            for thread, times in now.items()
        }
        of_steps_ns = waits_ns.pop(self._thread)
        longest_ns = max(waits_ns.values(), default=0)
        ran_ns = now[self._thread].run_ns - self._before[self._thread].run_ns
        return CpuUse(waited_s=(of_steps_ns + longest_ns) / 1e9, ran_s=ran_ns / 1e9)


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
            before = self._before.get(pid, now)
            cores = (now.run_ns - before.run_ns) / lasts_ns
            waiting = (now.wait_ns - before.wait_ns) / lasts_ns
            if pid in self._before:
                uses.append(ProcessUse(_name_of(pid), cores, waiting))

        workers = [use for use in uses if use.name == WORKER_NAME]
        processes = [use for use in uses if use.name != WORKER_NAME]
        worker_use = WorkerUse(
            number=len(workers),
            cores=sum(use.cores for use in workers),
            waiting=sum(use.waiting for use in workers),
        )
        busiest = max(processes, key=lambda use: use.cores + use.waiting, default=None)
        return worker_use if workers else None, busiest

    def _now(self) -> dict[int, ThreadTimes]:
        """Of the main thread of each, which makes the batches."""
        return {
            pid: thread_times(pid).get(pid, NEW_THREAD)
            for pid in descendants(os.getpid())
        }


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


def wait_for_collectives() -> bool:
    """Whether those of gloo have ended. Its threads write the end of a collective into memory of
    the profiler, which frees it when it stops."""
    if not dist.is_initialized() or not uses_gloo():
        return True
    until = time.perf_counter() + MOST_OPEN_S
    while has_open_collectives():
        if time.perf_counter() > until:
            return False
        time.sleep(POLL_S)
    return True


def has_open_collectives() -> bool:
    """Whether gloo still works on one. What a version of torch does not record counts as ended."""
    return any(
        str(entry.get("profiling_name")).startswith("gloo:")
        and not entry.get("retired", True)
        for entry in recorded_collectives()
        if not entry.get("is_p2p")
    )


def unused_gradients(
    modules: Sequence[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> float:
    """`OptimizerFacts` describes it. 0: also with several models, or where some weights may have no
    gradient."""
    if len(modules) != 1 or getattr(modules[0], "find_unused_parameters", False):
        return 0.0

    updated = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if float(group.get("lr", 1.0)) > 0
    }
    trained = [part for part in modules[0].parameters() if part.requires_grad]
    total = sum(part.nbytes for part in trained)
    used = sum(part.nbytes for part in trained if id(part) in updated)

    # With none that is used, optimizers have other tensors than the model, or no rate as yet.
    return 1 - used / total if used else 0.0


class SyncLines:
    """Records the source lines of what makes the host wait for a CUDA device: torch warns after an
    operation that does, and its functions that wait are wrapped. A profile with stacks would cost
    far more."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        """Unix time in ns, just after the call, and the line."""
        self._show_warning = warnings.showwarning
        self._waits = [
            (owner, owner.synchronize)
            for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
        ]

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
        """All is as before `start`."""
        torch.cuda.set_sync_debug_mode(self._mode)
        # the script may have replaced them, or added some
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        # leaving it discards what Python has cached of the filters
        with warnings.catch_warnings():
            pass
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
        while frame is not None and frame.f_code.co_filename.startswith(
            (TORCH, __file__, warnings.__file__)
        ):
            frame = frame.f_back
        if frame is not None and len(self.found) < MOST_SYNC_LINES:
            self.found.append(
                (time.time_ns(), f"{frame.f_code.co_filename}:{frame.f_lineno}")
            )


def file_version(path: Path) -> list[int] | None:
    """Tells a file from an earlier one of the same name, as JSON; None: there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def ddp_module(modules: Iterable[torch.nn.Module]) -> DistributedDataParallel | None:
    return next(
        (module for module in modules if isinstance(module, DistributedDataParallel)),
        None,
    )


def ddp_data(modules: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """What the first DDP module reports of itself; empty: not known."""
    if module := ddp_module(modules):
        with suppress(Exception):  # torch calls it unstable
            return ddp_measurements(module)
    return {}


def bucket_bytes(data: Mapping[str, Any]) -> tuple[int, ...]:
    """The sizes of DDP's buckets, in the order in which they are reduced; empty: not known."""
    sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
    return tuple(int(size) for size in sizes.split(",") if size.strip().isdigit())


def tensor_bytes(
    modules: Iterable[torch.nn.Module], data: Mapping[str, Any]
) -> tuple[int, ...]:
    """The sizes of the gradients in the order in which DDP puts them into buckets: that of the
    first backward pass. Empty: not known, as where parameters may be unused, since DDP then keeps
    the buckets that it made before that pass."""
    numbers = re.findall(r"\d+", str(data.get("rebuilt_per_bucket_param_indices", "")))
    module = ddp_module(modules)
    if module is None or not numbers:
        return ()
    ignored = names_ignored_by_ddp(module.module)
    sizes = [
        parameter.nbytes
        for name, parameter in module.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]

    order = [int(number) for number in numbers]
    is_whole = sorted(order) == list(range(len(sizes)))
    return tuple(sizes[number] for number in order) if is_whole else ()
