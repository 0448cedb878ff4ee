"""Reads torch.profiler's trace of one rank: its steps, when it computed, its collectives, data and
host syncs.

A trace is a file of a run folder: what does not have the expected type is left out.

A rank has joined a collective when it calls it: gloo's threads begin later if earlier ones keep
them busy, so calls and work are joined by their order, for waiting by the call and for bandwidth by
the work. NCCL's kernel starts when the rank joins.
"""

from __future__ import annotations

import itertools
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from drumline.base.untrusted import whole_number
from drumline.runs.profile_files import DATA_MARK, END_MARK, STEP_MARK
from drumline.tools.profile.intervals import Intervals, difference, union
from drumline.tools.profile.trace_entries import TraceEntry, decoded, read_trace

MOST_SECONDS = 1e11
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ENDING = ON_DEVICE | {"user_annotation", "cpu_op"}
"""What a trace without an end mark ends with."""
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
WAITS = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
)
BLOCKING_COPY_S = 50e-6
"""A cudaMemcpyAsync that takes longer waits for the device: its host memory is not pinned."""
LOADER_NEXT = re.compile(r"enumerate\(DataLoader\).*__next__")
NODE = "autograd::engine::evaluate_function: "
ACCUMULATES = f"{NODE}torch::autograd::AccumulateGrad"
OF_TORCH = re.compile(r"Backward\d+$|^Torch-Compiled Region|^CompiledFunction|^## Call CompiledFx")
ITEM_BYTES = {
    "Float": 4,
    "Half": 2,
    "BFloat16": 2,
    "Double": 8,
    "Long": 8,
    "Int": 4,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}


class Details(msgspec.Struct, frozen=True):
    """Arguments of an event."""

    correlation: int | str | None = None
    num_items: int | str | None = msgspec.field(name="In msg nelems", default=None)
    dtype: int | str | None = None
    group: int | str | None = msgspec.field(name="Process Group Name", default=None)
    source: str = "unknown"
    """The line of a host sync."""


NO_DETAILS = Details()


class Event(NamedTuple):
    """A range of a trace, in seconds since the trace's base time."""

    start: float
    end: float
    name: str
    kind: str
    thread: str
    details: Details


class TraceStep(NamedTuple):
    number: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective of a rank."""

    kind: str
    """As in `allreduce`; with the process group, where the trace has it."""
    call: float
    """When the rank joined: the call on the host, or the kernel's start."""
    start: float
    """When the library began to work on it: later than the call if earlier ones keep its threads
    busy."""
    end: float
    host_call: float | None
    """When the host called it; None: the trace has no call for it, as in a CUDA graph."""
    is_bucket: bool
    num_bytes: int


class OperationTime(NamedTuple):
    """All calls of a kernel, or of an operation on the CPU without those inside it, in a step."""

    name: str
    step: int
    seconds: float
    calls: int


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    base_ns: int
    """Unix time to which all other times are relative, by the clock of its host."""
    is_device: bool
    """Whether a GPU computes."""
    shift_s: float = 0.0
    """What was added to the times of its file."""
    steps: tuple[TraceStep, ...]
    compute: Intervals
    data: Intervals
    collectives: tuple[CollectiveCall, ...]
    """In the order of their calls."""
    syncs: tuple[Event, ...]
    backward: Intervals
    """Operations of backward passes, on the host."""
    gradients: NDArray[np.float64] = field(repr=False)
    """When the host had the gradient of each parameter, in each backward pass."""
    launches: NDArray[np.float64] = field(repr=False)
    """Rows of launch, start and end: every kernel that computes, in the order of their starts; on
    the CPU no rows."""
    operations: tuple[OperationTime, ...] = field(repr=False)
    """Of the steps."""


def read_events(path: Path) -> tuple[list[Event], int]:
    """The ranges of a trace, and the Unix time in ns that they are relative to. Raises OSError for
    a file that cannot be read, ValueError for one that is no trace."""
    trace = read_trace(path)
    events = sorted(_events(trace.entries()), key=lambda event: (event.start, -event.end))
    return events, trace.base_ns


def _events(entries: Iterable[TraceEntry]) -> Iterator[Event]:
    for entry in entries:
        start_us = entry.ts
        lasts_us = entry.dur
        if entry.ph != "X" or start_us is None or lasts_us is None:
            continue
        if 0 <= start_us / 1e6 < MOST_SECONDS and 0 <= lasts_us / 1e6 < MOST_SECONDS:
            yield Event(
                start_us / 1e6,
                (start_us + lasts_us) / 1e6,
                # Thousands of events share a name, a kind and a thread.
                sys.intern(entry.name),
                sys.intern(entry.cat),
                sys.intern(f"{entry.pid}:{entry.tid}"),
                _details(entry),
            )


def _details(entry: TraceEntry) -> Details:
    """Operations on the host, which most events are, have none that are read."""
    if entry.cat == "cpu_op":
        return NO_DETAILS
    details: Details = decoded(entry.args, Details)
    return details


def from_events(events: Sequence[Event], base_ns: int) -> RankTrace:
    """What a breakdown needs of a trace."""
    is_device = any(event.kind == "kernel" for event in events)
    gloo_threads = {event.thread for event in events if event.name.startswith("gloo:")}
    host = [
        event for event in events if event.kind == "cpu_op" and event.thread not in gloo_threads
    ]
    data = union(_times(e for e in events if e.name == DATA_MARK or LOADER_NEXT.match(e.name)))
    operations: Iterator[tuple[str, float, float]]
    if is_device:
        work = [
            event for event in events if event.kind in ON_DEVICE and not is_communication(event)
        ]
        operations = ((event.name, event.start, event.end - event.start) for event in work)
        compute = union(_times(work))
        launches = _launches(events, work)
    else:
        starts = np.searchsorted(data.reshape(-1), [event.start for event in host], "right")
        # What makes a batch is data.
        work = [
            event
            for event, place in zip(host, starts, strict=True)
            if place % 2 == 0 and is_compute(event.name)
        ]
        operations = _self_times(work)
        compute = difference(union(_times(work)), data)
        launches = np.empty((0, 3))
    steps = tuple(_steps(events, work, launches))
    return RankTrace(
        base_ns=base_ns,
        is_device=is_device,
        steps=steps,
        compute=compute,
        data=data,
        collectives=tuple(_collectives(events, host)),
        syncs=tuple(_syncs(events)) if is_device else (),
        backward=union(_times(event for event in host if event.name.startswith(NODE))),
        gradients=np.sort([event.end for event in host if event.name == ACCUMULATES]),
        launches=launches,
        operations=tuple(_operation_times(operations, steps)),
    )


def shifted(trace: RankTrace, shift_s: float) -> RankTrace:
    """The same trace, with this added to all times."""

    def moved(event: Event) -> Event:
        return event._replace(start=event.start + shift_s, end=event.end + shift_s)

    return replace(
        trace,
        base_ns=trace.base_ns - round(shift_s * 1e9),
        shift_s=shift_s,
        steps=tuple(
            TraceStep(step.number, step.start + shift_s, step.end + shift_s) for step in trace.steps
        ),
        compute=trace.compute + shift_s,
        data=trace.data + shift_s,
        collectives=tuple(_moved_call(call, shift_s) for call in trace.collectives),
        syncs=tuple(map(moved, trace.syncs)),
        backward=trace.backward + shift_s,
        gradients=trace.gradients + shift_s,
        launches=trace.launches + shift_s,
    )


def _moved_call(call: CollectiveCall, shift_s: float) -> CollectiveCall:
    return replace(
        call,
        call=call.call + shift_s,
        start=call.start + shift_s,
        end=call.end + shift_s,
        host_call=None if call.host_call is None else call.host_call + shift_s,
    )


def _launches(events: Sequence[Event], kernels: Sequence[Event]) -> NDArray[np.float64]:
    called = {event.details.correlation: event.start for event in events if event.kind in LAUNCHES}
    rows = [
        (called.get(kernel.details.correlation, kernel.start), kernel.start, kernel.end)
        for kernel in kernels
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def is_compute(name: str) -> bool:
    """Whether an operation on the CPU is work. Nodes of Python functions are not, as they may wait
    for a collective; the operations inside them are."""
    if name.startswith((NODE, "c10d::", "_c10d_functional")):
        return False
    return "::" in name or OF_TORCH.search(name) is not None


def is_communication(event: Event) -> bool:
    return "nccl" in event.name[:5]


def _times(events: Iterable[Event]) -> Iterator[tuple[float, float]]:
    return ((event.start, event.end) for event in events)


def _steps(
    events: Sequence[Event], work: Sequence[Event], launches: NDArray[np.float64]
) -> Iterator[TraceStep]:
    """A step lasts until the next one starts. On a GPU it starts with the first kernel that it
    launches on the stream that computes most: the host may be ahead by whole steps."""
    starts: dict[int, float] = {}
    for event in events:
        digits = event.name.removeprefix(STEP_MARK)
        if (
            event.kind == "user_annotation"
            and digits != event.name
            and (number := whole_number(digits)) is not None
        ):
            starts.setdefault(number, event.start)
    if not starts:
        raise ValueError("it has no steps")
    ends = [event.end for event in events if event.name == END_MARK]
    end = (
        ends[-1]
        if ends
        else max((event.end for event in events if event.kind in ENDING), default=0.0)
    )
    times = (
        _device_starts(list(starts.values()), work, launches)
        if len(launches)
        else list(starts.values())
    )
    if any(later <= earlier for earlier, later in itertools.pairwise([*times, end])):
        raise ValueError("its steps are not in order")
    for number, start, until in zip(starts, times, [*times[1:], end], strict=True):
        yield TraceStep(number, start, until)


def _device_starts(
    host: list[float], work: Sequence[Event], launches: NDArray[np.float64]
) -> list[float]:
    """As those on the host if a step has no kernel."""
    busy: dict[str, float] = defaultdict(float)
    for event in work:
        busy[event.thread] += event.end - event.start
    main = launches[[event.thread == max(busy, key=lambda name: busy[name]) for event in work]]
    first_kernels = []
    for low, high in zip(host, [*host[1:], np.inf], strict=True):
        of_step = main[(main[:, 0] >= low) & (main[:, 0] < high), 1]
        first_kernels.append(float(of_step.min()) if len(of_step) else None)
    starts = [start for start in first_kernels if start is not None]
    return starts if len(starts) == len(first_kernels) else host


def _self_times(nested: Sequence[Event]) -> Iterator[tuple[str, float, float]]:
    """Each operation of a thread, less those inside it."""
    open_ones: dict[str, list[list[Any]]] = defaultdict(list)
    for event in nested:
        stack = open_ones[event.thread]
        while stack and stack[-1][0].end <= event.start:
            done, seconds = stack.pop()
            yield done.name, done.start, seconds
        lasts = event.end - event.start
        if stack:
            stack[-1][1] -= lasts
        stack.append([event, lasts])
    for stack in open_ones.values():
        yield from ((done.name, done.start, seconds) for done, seconds in stack)


def _operation_times(
    operations: Iterable[tuple[str, float, float]], steps: Sequence[TraceStep]
) -> Iterator[OperationTime]:
    """`operations`: the name, the start and the seconds of each."""
    starts = [step.start for step in steps]
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    calls: dict[tuple[str, int], int] = defaultdict(int)
    for name, start, lasts in operations:
        place = bisect_right(starts, start) - 1
        if place >= 0 and start < steps[place].end:
            key = (name, steps[place].number)
            seconds[key] += lasts
            calls[key] += 1
    for (name, number), total_s in seconds.items():
        yield OperationTime(name, number, total_s, calls[name, number])


def _collectives(events: Sequence[Event], host: Sequence[Event]) -> list[CollectiveCall]:
    """Calls on the host and the library's work, which begin in the same order, are joined."""
    calls: dict[str, list[Event]] = defaultdict(list)
    works: dict[str, list[Event]] = defaultdict(list)
    for event in host:
        if event.name.startswith("c10d::"):
            calls[_plain(event.name[6:])].append(event)
    for event in events:
        if event.name.startswith("gloo:"):
            works[_plain(event.name[5:])].append(event)
        elif event.kind == "kernel" and is_communication(event):
            works[_plain(event.name.split("_")[1] if "_" in event.name else event.name)].append(
                event
            )
    inside: dict[str, list[Event]] = defaultdict(list)
    for event in host:
        if event.name == ACCUMULATES:
            inside[event.thread].append(event)
    collectives = []
    for kind, done in works.items():
        begun: Sequence[Event | None] = (
            calls[kind] if len(calls[kind]) == len(done) else [None] * len(done)
        )
        collectives += [
            _joined(kind, call, work, inside) for call, work in zip(begun, done, strict=True)
        ]
    return sorted(collectives, key=lambda collective: collective.call)


def _joined(
    kind: str, call: Event | None, work: Event, inside: Mapping[str, Sequence[Event]]
) -> CollectiveCall:
    details = work.details
    count = details.num_items
    item = ITEM_BYTES.get(str(details.dtype), 0)
    group = details.group
    on_device = work.kind == "kernel"  # where a rank joins when the kernel starts
    return CollectiveCall(
        kind=f"{kind}:{group}" if isinstance(group, str) else kind,
        call=work.start if call is None or on_device else call.start,
        start=work.start,
        end=work.end,
        host_call=None if call is None else call.start,
        is_bucket=call is not None
        and kind == "allreduce"
        and _is_inside(call, inside.get(call.thread, ())),
        num_bytes=count * item if isinstance(count, int) and 0 < count < 1 << 50 else 0,
    )


def _is_inside(call: Event, ranges: Sequence[Event]) -> bool:
    place = bisect_right(ranges, call.start, key=lambda event: event.start)
    return place > 0 and call.end <= ranges[place - 1].end


def _plain(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


def _syncs(events: Sequence[Event]) -> Iterator[Event]:
    """Those of the steps, by the host's time, but not of the profiler's own end."""
    low = min((event.start for event in events if event.name.startswith(STEP_MARK)), default=0.0)
    high = max((event.start for event in events if event.name == END_MARK), default=np.inf)
    for event in events:
        is_copy = event.name == "cudaMemcpyAsync" and event.end - event.start > BLOCKING_COPY_S
        if (
            event.kind == "cuda_runtime"
            and (is_copy or event.name in WAITS)
            and low <= event.start < high
        ):
            yield event
