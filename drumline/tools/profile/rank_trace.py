"""What a breakdown needs of the trace of one rank: its steps, when it computed, its collectives, data
and host syncs.

A rank has joined a collective when it calls it: gloo's threads begin later if earlier ones keep
them busy, so calls and work are joined by their order, for waiting by the call and for bandwidth by
the work. NCCL's kernel starts when the rank joins.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from drumline.runs.profile_files import (
    ALLOCATIONS,
    DATA_MARK,
    END_MARK,
    STEP_MARK,
    Pause,
)
from drumline.tools.profile.intervals import (
    Integers,
    Intervals,
    Mask,
    Numbers,
    contains,
    difference,
    union,
)
from drumline.tools.profile.trace_file import ON_DEVICE, Event, EventColumns

LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
WAITS = frozenset(
    {
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        *ALLOCATIONS,
    }
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
LAYERS = re.compile(
    r"mm$|bmm|linear|conv|attention|_norm|embedding|lu(_|$)|tanh|sigmoid|softmax|dropout|loss|entropy|lstm|gru|rnn|pool"
    r"|add_?$|mul_?$|div_?$|mean$|cat$|stack$"
)
"""What the layers of a model compute most of their time, also those that add to their inputs."""


class TraceStep(NamedTuple):
    """A step, in seconds since the base time of the trace."""

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
    """All calls of a kernel, or of an operation on the CPU without those inside it."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What a breakdown needs of the trace of a rank; times are in seconds."""

    base_ns: int
    """Unix time to which all other times are relative, by the clock of its host."""
    is_device: bool
    """Whether a GPU computes."""
    steps: Sequence[TraceStep]
    """Those that count."""
    compute: Intervals
    """When it computed: the GPU's kernels, or the CPU's operations without those that make data."""
    data: Intervals
    """When the host waited for a batch."""
    collectives: tuple[CollectiveCall, ...]
    """In the order of their calls."""
    syncs: tuple[Event, ...]
    """Calls of the host that wait for the GPU."""
    backward: Intervals
    """Operations of backward passes, on the host."""
    host_operations: Intervals
    """The operations on the host, without those inside another one and those that make a batch."""
    differentiated: Intervals
    """Operations of forward passes that have a gradient, on the host."""
    gradients: Numbers = field(repr=False)
    """When the host had the gradient of each parameter, in each backward pass."""
    launches: Numbers = field(repr=False)
    """Rows of launch, start and end: every kernel that computes, in the order of their starts; on
    the CPU no rows."""
    special: Numbers = field(repr=False)
    """Rows of start and seconds: the operations that are no layers, on the CPU; on a GPU no rows."""
    operations: tuple[OperationTime, ...] = field(repr=False)
    """Of the steps."""


TracesByRank = Mapping[int, RankTrace]


def spans(ranges: Sequence[TraceStep | Event]) -> Intervals:
    """The instants of any of these."""
    return union((item.start, item.end) for item in ranges)


def open_times(calls: Sequence[CollectiveCall]) -> Intervals:
    """When any of these collectives was open."""
    return union((call.call, call.end) for call in calls)


def from_events(columns: EventColumns, pauses: Sequence[Pause] = ()) -> RankTrace:
    """What a breakdown needs of a trace. `pauses`: after its steps."""
    host = _host_operations(columns)
    is_data = columns.named(lambda name: name == DATA_MARK or LOADER_NEXT.match(name))
    data = union(columns.where(is_data).times())

    # What makes a batch is data.
    operations = host.where(host.named(is_compute))
    operations = operations.where(~contains(data, operations.start))

    is_device = any(label.kind == "kernel" for label in columns.labels)
    if is_device:
        is_work = columns.of_kinds(ON_DEVICE) & ~columns.named(is_communication)
        work = columns.where(is_work)
        seconds = work.end - work.start
        compute = union(work.times())
        launches = _launches(columns, work)
        special = np.empty((0, 2))
    else:
        work = operations
        seconds = _self_times(work)
        compute = difference(union(work.times()), data)
        launches = np.empty((0, 3))
        is_special = ~work.named(LAYERS.search)
        special = np.stack([work.start, seconds], axis=1)[is_special]

    steps = counted_steps(_steps(columns, work, launches), pauses, columns.base_ns)
    is_backward = host.named(lambda name: name.startswith(NODE))
    is_differentiated = np.isin(host.start, columns.differentiated)
    is_accumulation = host.named(lambda name: name == ACCUMULATES)

    return RankTrace(
        base_ns=columns.base_ns,
        is_device=is_device,
        steps=steps,
        compute=compute,
        data=data,
        collectives=tuple(_collectives(columns, host)),
        syncs=tuple(_syncs(columns)) if is_device else (),
        backward=union(host.where(is_backward).times()),
        host_operations=union(operations.times()),
        differentiated=union(host.where(is_differentiated).times()),
        gradients=np.sort(host.end[is_accumulation]),
        launches=launches,
        special=special,
        operations=tuple(_operation_times(work, seconds, steps)),
    )


def _host_operations(columns: EventColumns) -> EventColumns:
    """The operations on the host, without the work of gloo's own threads. A rank sends and receives
    on the thread that calls it."""
    labels = columns.labels
    callers = {label.thread for label in labels if label.name.startswith("c10d::")}
    gloo_threads = {label.thread for label in labels if label.name.startswith("gloo:")}
    gloo_threads -= callers
    is_host = columns.labelled(
        lambda label: label.kind == "cpu_op" and label.thread not in gloo_threads
    )

    return columns.where(is_host)


def _launches(columns: EventColumns, kernels: EventColumns) -> Numbers:
    """For each kernel: when the host launched it, its start and its end. A launch and its kernel have
    one correlation; a kernel of a graph may have no launch, and counts from its start."""
    calls = columns.where(columns.of_kinds(LAUNCHES))
    launches = {call.details.correlation: call.start for call in calls.events()}

    rows = []
    for kernel in kernels.events():
        launch = launches.get(kernel.details.correlation, kernel.start)
        rows.append((launch, kernel.start, kernel.end))

    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def is_compute(name: str) -> bool:
    """Whether an operation on the CPU is work, as `aten::mm` and `AddmmBackward0` are. Nodes of Python
    functions are not, as they may wait for a collective; the operations inside them are."""
    if name.startswith((NODE, "c10d::", "_c10d_functional")):
        return False
    return "::" in name or OF_TORCH.search(name) is not None


def is_communication(name: str) -> bool:
    """Whether a kernel is one of NCCL.

    `ncclDevKernel_AllReduce_Sum_f32_RING_LL`.
    """
    return "nccl" in name[:5]


def _steps(
    columns: EventColumns,
    work: EventColumns,
    launches: Numbers,
) -> list[TraceStep]:
    """The steps, by the marks that the profiled rank wrote: `drumline.step#12`.

    A step lasts until the next one starts. On a GPU it starts with the first kernel that it
    launches on the stream that computes most: the host may be ahead by whole steps."""
    is_mark = columns.named(lambda name: name.startswith(STEP_MARK))
    marks = columns.where(is_mark & columns.of_kinds({"user_annotation"})).events()
    ends = columns.end[columns.named(lambda name: name == END_MARK)]
    if not marks or not len(ends):
        raise ValueError("it has no steps, or no end of the last one")

    starts = [mark.start for mark in marks]
    if len(launches):
        starts = _device_starts(starts, work, launches)

    steps = []
    edges = itertools.pairwise([*starts, float(ends[-1])])
    for mark, (start, end) in zip(marks, edges, strict=True):
        if end <= start:
            raise ValueError("its steps are not in order")

        number = int(mark.name.removeprefix(STEP_MARK))
        steps.append(TraceStep(number, start, end))

    return steps


def counted_steps(
    steps: Sequence[TraceStep], pauses: Sequence[Pause], base_ns: int
) -> Sequence[TraceStep]:
    """The steps without those that an evaluation or a save followed, which last until the next step begins.
    If no other is left: these, until it began."""
    first_pauses: dict[int, float] = {}
    for pause in pauses:
        first_pauses.setdefault(pause.step, (pause.began_ns - base_ns) / 1e9)

    without_pause = [step for step in steps if step.number not in first_pauses]
    if without_pause:
        return without_pause

    shorter_steps = []
    for step in steps:
        end = min(step.end, first_pauses[step.number])
        # A device may begin a step after that.
        shorter_steps.append(step._replace(end=max(step.start, end)))

    return shorter_steps


def _device_starts(
    host_starts: list[float],
    work: EventColumns,
    launches: Numbers,
) -> list[float]:
    """When the GPU began each step; as on the host if a step has no kernel.

    A host that launches ahead marks the next step while the device still computes the one before.
    """
    streams, _ = work.numbered(lambda label: label.thread)
    busy_s = np.bincount(streams, work.end - work.start)
    on_busiest = launches[streams == busy_s.argmax()]
    launched = on_busiest[:, 0]
    kernel_starts = on_busiest[:, 1]

    first_kernels = []
    for low, high in itertools.pairwise([*host_starts, np.inf]):
        is_in_step = (launched >= low) & (launched < high)
        if not is_in_step.any():
            return host_starts

        first_kernels.append(float(kernel_starts[is_in_step].min()))

    return first_kernels


def _self_times(nested: EventColumns) -> Numbers:
    """The seconds of each operation, less those inside it: of `aten::linear` from 0 to 9, with
    `aten::addmm` from 2 to 8 inside it, 3. Ten times as fast as a loop over half a million."""
    threads, _ = nested.numbered(lambda label: label.thread)
    by_thread = np.argsort(threads, kind="stable")
    rows = nested.where(by_thread)
    lasts_s = rows.end - rows.start

    is_first_of_thread = np.diff(threads[by_thread], prepend=-1) != 0
    outer = _outer_places(rows, is_first_of_thread)
    is_inside = outer >= 0
    self_s = lasts_s.copy()
    np.subtract.at(self_s, outer[is_inside], lasts_s[is_inside])

    seconds = np.empty_like(self_s)
    seconds[by_thread] = self_s  # back into the order of the operations
    return seconds


def _outer_places(rows: EventColumns, is_first: Mask) -> Integers:
    """The last row before each one that has not ended when it starts; -1: none of its thread.

    Rows that ended before an earlier one started have ended for this one, too: each round goes
    back by all that the row before has already passed."""
    outer = np.arange(len(rows)) - 1
    outer[is_first] = -1

    searching = np.flatnonzero(outer >= 0)
    while len(searching):
        has_ended = rows.end[outer[searching]] <= rows.start[searching]
        searching = searching[has_ended]
        outer[searching] = outer[outer[searching]]
        searching = searching[outer[searching] >= 0]

    return outer


def _operation_times(
    work: EventColumns, seconds: Numbers, steps: Sequence[TraceStep]
) -> Iterator[OperationTime]:
    """The time of each operation in the steps: `aten::mm`, 0.4 s, 120 calls."""
    is_in_step = contains(spans(steps), work.start)
    places, names = work.numbered(lambda label: label.name)
    places = places[is_in_step]
    totals_s = np.bincount(places, seconds[is_in_step])
    calls = np.bincount(places)

    for place in np.flatnonzero(calls).tolist():
        seconds_of_name = float(totals_s[place])
        yield OperationTime(names[place], seconds_of_name, int(calls[place]))


def _collectives(columns: EventColumns, host: EventColumns) -> list[CollectiveCall]:
    """Calls on the host and the library's work, which begin in the same order, are joined: the n-th
    `c10d::allreduce_` with the n-th `gloo:all_reduce`, or with the n-th kernel of that kind."""
    is_call = host.named(lambda name: name.startswith("c10d::"))
    calls: dict[str, list[Event]] = defaultdict(list)
    for event in host.where(is_call).events():
        calls[_plain(event.name[6:])].append(event)

    is_gloo = columns.named(lambda name: name.startswith("gloo:"))
    is_nccl = columns.of_kinds({"kernel"}) & columns.named(is_communication)

    works: dict[str, list[Event]] = defaultdict(list)
    for event in columns.where(is_gloo | is_nccl).events():
        works[_kind_of_work(event.name)].append(event)

    is_accumulation = host.named(lambda name: name == ACCUMULATES)
    accumulations = union(host.where(is_accumulation).times())

    collectives = []
    for kind, works_of_kind in works.items():
        calls_of_kind: Sequence[Event | None] = calls[kind]
        if len(calls_of_kind) != len(works_of_kind):
            calls_of_kind = [None] * len(works_of_kind)

        for call, work in zip(calls_of_kind, works_of_kind, strict=True):
            collectives.append(_joined(kind, call, work, accumulations))

    return sorted(collectives, key=lambda collective: collective.call)


def _joined(
    kind: str,
    call: Event | None,
    work: Event,
    accumulations: Intervals,
) -> CollectiveCall:
    """One collective, from its call on the host, which may be missing, and the library's work.

    `accumulations`: when the gradients of parameters are accumulated.

    A rank has joined a collective of gloo when it calls it, and one of NCCL when its kernel starts.
    """
    host_call = None
    joined = work.start

    is_bucket = False
    if call is not None:
        host_call = call.start
        # DDP reduces whole numbers, too: which parameters were used.
        is_gradient = kind == "allreduce" and work.details.dtype != "Int"
        is_bucket = is_gradient and bool(contains(accumulations, np.array(call.start)))
        if work.label.kind != "kernel":  # which a rank joins when it starts
            joined = call.start

    group = work.details.group
    return CollectiveCall(
        kind=f"{kind}:{group}" if group else kind,
        call=joined,
        start=work.start,
        end=work.end,
        host_call=host_call,
        is_bucket=is_bucket,
        num_bytes=work.details.num_items * ITEM_BYTES.get(work.details.dtype, 0),
    )


def _kind_of_work(name: str) -> str:
    """`allreduce` of `gloo:all_reduce` and of `ncclDevKernel_AllReduce_Sum_f32_RING_LL`."""
    if name.startswith("gloo:"):
        return _plain(name[5:])
    return _plain(name.split("_")[1] if "_" in name else name)


def _plain(name: str) -> str:
    """The letters of a name, in lower case."""
    return re.sub(r"[^a-z]", "", name.lower())


def _syncs(columns: EventColumns) -> list[Event]:
    """Calls that wait for the device: `cudaStreamSynchronize`, or a copy that blocks. Those after the
    last step are the profiler's own."""
    is_end = columns.named(lambda name: name == END_MARK)
    end = columns.start[is_end].max()
    is_long = columns.end - columns.start > BLOCKING_COPY_S
    is_blocking_copy = columns.named(lambda name: name == "cudaMemcpyAsync") & is_long
    is_wait = columns.named(lambda name: name in WAITS)
    is_call = columns.of_kinds({"cuda_runtime"}) & (columns.start < end)

    return columns.where(is_call & (is_blocking_copy | is_wait)).events()
