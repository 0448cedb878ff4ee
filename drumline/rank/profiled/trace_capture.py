"""torch.profiler over some steps of one rank: the trace, and the facts that it lacks, as files of a
profile."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from drumline.base.rank_environment import Topology
from drumline.base.startup import quiet_profiler
from drumline.base.text import MIB, print_message
from drumline.base.untrusted import make_own_folder, replace_bytes, replacing
from drumline.rank.collectives import gather_json, gather_on_main
from drumline.rank.profiled.slow_modes import OtherProfilers, SlowModes, python_tracers
from drumline.rank.profiled.stack_sampler import (
    BUSY_THREAD,
    Phases,
    StackSampler,
    code_of,
    other_threads_ns,
    phases_of_torch,
)
from drumline.rank.profiled.step_inspection import StepInspection
from drumline.rank.profiled.step_observation import StepObservation
from drumline.rank.torch_internals import (
    ddp_measurements,
    names_ignored_by_ddp,
    recorded_collectives,
    uses_gloo,
)
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
    RankFacts,
    WastedWork,
    facts_path,
    trace_path,
    write_facts,
)

T = TypeVar("T")
_END = object()
MOST_OPEN_S = 10.0
"""For so long the end of a profile waits for collectives that are still open."""

POLL_S = 0.02
LATER_S = 1.0
"""How often a profiler that could not be stopped is tried again."""

UNSTOPPED: list[Any] = []
"""Profilers that were not stopped: gloo's threads may still write into their memory."""


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
        """Of the present step in the trace."""

        self._number = 0
        """Of the present step."""

        self._timed_from: tuple[int, float] | None = None
        """The step from which on steps without the profiler are timed, and when it began."""

        self._unprofiled_s: float | None = None
        self._with_modes_s: float | None = None
        """Of the steps before, with what is off in the others; None: there is none."""

        self._loading_s = 0.0
        """How long the loop waited for batches."""

        self._loading_cpu_s = 0.0
        """The CPU time meanwhile."""

        self._observation: StepObservation
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
        self._pauses: list[Pause] = []
        """Between the profiled steps."""

        self._paused_s = 0.0
        """Since the beginning, between all steps."""

        self._others = OtherProfilers()
        self._slow_modes = SlowModes()
        self._inspection: StepInspection | None = None
        """While the step before the profiled ones runs."""

        self._wasted: tuple[WastedWork, ...] = ()
        self._num_passes: int | None = None
        self._tracers: tuple[str, ...] = ()
        """What could not be turned off."""

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
        if self.is_recording:
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
            self._observation.stop()
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
        for path in (trace_path(self._folder, self._rank), facts_path(self._folder, self._rank)):
            version = file_version(path) if self._is_written else None
            files = gather_json((path.name, version))
            is_here = [file_version(self._folder / name) == expected for name, expected in files]
            is_seen = gather_json(is_here)[0]

            is_sent = self._is_written and not is_seen[self._rank]
            content = path.read_bytes() if is_sent else b""
            sent = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)]

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
        """When all that was started on the device has ended."""
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
        marked = {code_of(TraceCapture.marked): "data"}
        sampler = StackSampler({**phases_of_torch(), **marked, **self.phases}, self.modules)
        self._observation = StepObservation(
            sampler, has_gpu=self._is_gpu, is_alone=not self._has_busy_thread()
        )
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
        """A range in the trace, until the step ends."""
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

        self._observation.stop()
        self._slow_modes.resume()

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

    def stop_late(self) -> bool:
        """Whether nothing is recorded any more. Call it between steps: a profiler that could not be
        stopped after the last profiled step is stopped when no collective is open, and what it has
        recorded is discarded."""
        if not UNSTOPPED:
            return True
        if time.perf_counter() < self._next_try_s:
            return False

        if has_open_collectives():
            self._next_try_s = time.perf_counter() + LATER_S
            return False

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
        models = [part for part in self.modules if isinstance(part, DistributedDataParallel)]
        data = ddp_data(models[0]) if models else {}
        num_steps = self._number - self._steps.start
        loading_cores = self._loading_cpu_s / self._loading_s if self._loading_s else None

        slow_modes_s = None
        if self._with_modes_s is not None and self._unprofiled_s is not None:
            slow_modes_s = max(0.0, self._with_modes_s - self._unprofiled_s)

        job = self._job
        if not job.settings and (cap := data.get("bucket_cap_bytes")):  # a script's
            job = replace(job, bucket_cap_mb=cap / MIB)

        use = self._observation
        return RankFacts(
            rank=self._rank,
            world_size=self._topology.world_size,
            host=self._topology.host,
            device=torch.cuda.get_device_name() if self._is_gpu else "cpu",
            backend=self._backend,
            first_step=self._steps.start,
            num_steps=num_steps,
            bucket_bytes=bucket_bytes(data),
            num_models=len(models),
            tensor_bytes=tensor_bytes(models[0].module, data) if models else (),
            unprofiled_step_s=self._unprofiled_s,
            slow_modes_s=slow_modes_s,
            cpus=tuple(os.sched_getaffinity(0)),
            host_cpus=os.cpu_count(),
            loading_cores=loading_cores,
            cpu_wait_s=None if use.cpu is None else use.cpu.waited_s / num_steps,
            cpu_run_s=None if use.cpu is None else use.cpu.ran_s / num_steps,
            pauses=tuple(self._pauses),
            sync_lines=tuple(use.syncs.lines),
            optimizer=self._optimizer_facts(),
            num_optimizers=self.num_optimizers,
            workers=use.workers,
            process=use.process,
            has_sync_batchnorm=self._has_sync_batchnorm(),
            searches_kernels=torch.backends.cudnn.benchmark,
            num_threads=torch.get_num_threads(),
            checks_collectives=dist.get_debug_level() == dist.DebugLevel.DETAIL,
            num_passes=self._num_passes,
            wasted=self._wasted,
            own_profiler=self._others.line,
            slow_modes=tuple(self._slow_modes.names),
            tracers=self._tracers,
            stacks=use.stacks,
            job=job,
        )

    def _has_sync_batchnorm(self) -> bool:
        """Whether a model waits for the other ranks within a forward pass."""
        layers = (part for module in self.modules for part in module.modules())
        return any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in layers)

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
    for entry in recorded_collectives():
        is_gloo = str(entry.get("profiling_name")).startswith("gloo:")
        is_open = not entry.get("retired", True)
        if is_gloo and is_open and not entry.get("is_p2p"):
            return True
    return False


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


def file_version(path: Path) -> list[int] | None:
    """Tells a file from an earlier one of the same name, as JSON; None: there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def ddp_data(model: DistributedDataParallel) -> Mapping[str, Any]:
    """What it reports of itself; empty: not known."""
    with suppress(Exception):  # torch calls it unstable
        return ddp_measurements(model)
    return {}


def bucket_bytes(data: Mapping[str, Any]) -> tuple[int, ...]:
    """The sizes of DDP's buckets, in the order in which they are reduced; empty: not known."""
    sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
    return tuple(int(size) for size in sizes.split(",") if size.strip().isdigit())


def tensor_bytes(model: torch.nn.Module, data: Mapping[str, Any]) -> tuple[int, ...]:
    """The sizes of the gradients in the order in which DDP puts them into buckets: that of the
    first backward pass. Empty: not known, as where parameters may be unused, since DDP then keeps
    the buckets that it made before that pass."""
    numbers = re.findall(r"\d+", str(data.get("rebuilt_per_bucket_param_indices", "")))
    order = list(map(int, numbers))

    ignored = names_ignored_by_ddp(model)
    sizes = [
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]

    is_whole = sorted(order) == list(range(len(sizes)))
    return tuple(sizes[number] for number in order) if is_whole else ()
