"""Reads torch.profiler's trace of one rank: its steps, when it computed, its collectives, data and
host syncs.

A trace is a file of a run folder: what does not have the expected type is left out.

A rank has joined a collective when it calls it: gloo's threads begin later if earlier ones keep
them busy, so calls and work are joined by their order, for waiting by the call and for bandwidth by
the work. NCCL's kernel starts when the rank joins.
"""

from __future__ import annotations

import gzip
import itertools
import os
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from drumline.base.untrusted import DOCUMENT_BYTES, open_regular, whole_number
from drumline.runs.profile_files import DATA_MARK, END_MARK, STEP_MARK
from drumline.tools.profile.intervals import Intervals, difference, union

MOST_BYTES = 1 << 30
"""Of a trace, unpacked."""
PART_BYTES = 1 << 17
"""What is decoded at once: its entries fit into a core's cache."""
SMALL_BYTES = 1 << 20
MAX_RATIO = 64
"""How many times as large as its file a large trace may be, unpacked: those of torch.profiler are
10 to 20 times as large."""
BYTES_PER_VALUE = 12
"""Of what is decoded in one part, for each object and list in it, at least: traces of torch.profiler
have more than 30. Empty ones take 30 times their bytes in memory."""
NO_ARGUMENTS = msgspec.Raw(b"{}")


class TraceEntry(msgspec.Struct, gc=False, omit_defaults=True):
    """One entry, by the trace event format; times are in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: float | None = None
    dur: float | None = None
    id: int | str | None = None
    s: str | None = None
    bp: str | None = None
    args: msgspec.Raw = NO_ARGUMENTS


class Document(msgspec.Struct):
    """A trace of which single entries may have another type."""

    raw_entries: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)


class EntryDocument(msgspec.Struct):
    """A trace, or a part of it."""

    entries: list[TraceEntry] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)


ENTRY = msgspec.json.Decoder(TraceEntry)
DOCUMENT = msgspec.json.Decoder(EntryDocument)
OPENING = b'{"traceEvents": ['
CLOSING = b"]}"
BETWEEN = b"\n  },\n  {"
"""Between two entries, as torch writes them: no text in JSON has a line break. A trace that somebody
else wrote in another way is decoded in one part."""


def read_parts(path: Path) -> Iterator[tuple[list[TraceEntry], int]]:
    """The entries of a torch.profiler trace, in parts, and the Unix time in ns that their times are
    relative to; entries of other types are left out. A trace of some steps has a hundred MB:
    arguments stay as they are until somebody asks for them."""
    base_ns = 0
    for content in _documents(path):
        try:
            document = DOCUMENT.decode(content)
            entries = document.entries
            written_ns = document.base_ns
        except (msgspec.MsgspecError, RecursionError):
            raw_document: Document = decoded(content, Document)
            entries = list(decodable(raw_document.raw_entries))
            written_ns = raw_document.base_ns

        if not 0 <= written_ns < 1 << 62:
            raise ValueError("its base time is no time")
        base_ns = written_ns or base_ns  # torch writes it before the entries
        yield entries, base_ns


def _documents(path: Path) -> Iterator[bytes]:
    """The trace as documents with some of its entries each."""
    pieces = [b""]
    size = 0
    num_values = 0
    for part in unpacked(path):
        place = part.rfind(BETWEEN)
        if place < 0:
            pieces.append(part)
            size += len(part)
            num_values += part.count(b"{") + part.count(b"[")
            check_values(num_values, size)
            continue

        entry_end = place + len(b"\n  }")
        yield b"".join([*pieces, part[:entry_end], CLOSING])
        next_entry = entry_end + len(b",")
        pieces = [OPENING, part[next_entry:]]
        size = 0
        num_values = 0

    yield b"".join(pieces)


def check_values(num_values: int, size: int) -> None:
    """Refuses a part of a trace that would be many times as large in memory."""
    if num_values * BYTES_PER_VALUE > size + SMALL_BYTES:
        raise ValueError(
            f"it has {num_values:,} objects and lists in {size:,} bytes, more than a trace"
        )


def decodable(raw_entries: Iterable[msgspec.Raw]) -> Iterator[TraceEntry]:
    """The entries that have the expected types."""
    for raw_entry in raw_entries:
        with suppress(msgspec.MsgspecError):
            yield ENTRY.decode(raw_entry)


def decoded(content: bytes | msgspec.Raw, kind: Any) -> Any:
    """The content of this type; a ValueError if it is another."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"it is no trace: {error}") from None


def unpacked(path: Path, most: int = MOST_BYTES) -> Iterator[bytes]:
    """The content of a gzip file of at most so many bytes, not many times as many as the file
    has."""
    size = 0
    try:
        with open_regular(path) as file, gzip.open(file) as packed:
            packed_size = os.fstat(file.fileno()).st_size
            most = min(most, DOCUMENT_BYTES + MAX_RATIO * packed_size)
            while part := packed.read(PART_BYTES):
                size += len(part)
                if size > most:
                    raise ValueError(f"it has more than {most:,} bytes")
                yield part

    except EOFError:
        raise ValueError("it is incomplete") from None
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from None


Mask = NDArray[np.bool_]
MOST_US = 1e17
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
WAITS = frozenset(
    {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
)
BLOCKING_COPY_S = 50e-6
"""A cudaMemcpyAsync that takes longer waits for the device: its host memory is not pinned."""
LOADER_NEXT = re.compile(r"enumerate\(DataLoader\).*__next__")
TO_BACKWARD = "fwdbwd"
"""The kind of the arrow from an operation to that of its gradient."""
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


class Label(NamedTuple):
    """What thousands of events have in common."""

    name: str
    kind: str
    """The category of its entry, such as `cpu_op` or `kernel`."""
    thread: str
    """`PROCESS:THREAD`; of a kernel, its device and stream."""


class Event(NamedTuple):
    """A range of a trace, in seconds since the trace's base time."""

    start: float
    end: float
    label: Label
    details: Details

    @property
    def name(self) -> str:
        return self.label.name


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
    """All calls of a kernel, or of an operation on the CPU without those inside it, in a step."""

    name: str
    step: int
    seconds: float
    calls: int


CLIPS = ("aten::_foreach_norm", "aten::_foreach_clamp_min_")
"""What clip_grad_norm_ and clip_grad_value_ call once for all their tensors."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What a breakdown needs of the trace of a rank; times are in seconds."""

    base_ns: int
    """Unix time to which all other times are relative, by the clock of its host."""
    is_device: bool
    """Whether a GPU computes."""
    steps: tuple[TraceStep, ...]
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
    """The operations on the host, without those inside another one."""
    differentiated: Intervals
    """Operations of forward passes that have a gradient, on the host."""
    clippings: NDArray[np.float64] = field(repr=False)
    """When each call began that clips gradients."""
    gradients: NDArray[np.float64] = field(repr=False)
    """When the host had the gradient of each parameter, in each backward pass."""
    launches: NDArray[np.float64] = field(repr=False)
    """Rows of launch, start and end: every kernel that computes, in the order of their starts; on
    the CPU no rows."""
    operations: tuple[OperationTime, ...] = field(repr=False)
    """Of the steps."""


@dataclass(frozen=True, kw_only=True)
class EventColumns:
    """The events of a trace by their starts, the outer before the inner ones. A trace has hundreds
    of thousands: few of them become an `Event`."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    label: NDArray[np.int32]
    """Places in `labels`."""
    number: NDArray[np.int64]
    """Their keys in `details`."""
    labels: list[Label]
    details: Mapping[int, Details]
    """Of those that have any."""
    differentiated: NDArray[np.float64]
    """When operations began that have one in the backward pass."""

    def __len__(self) -> int:
        return len(self.start)

    def where(self, chosen: Mask | NDArray[np.int64]) -> EventColumns:
        """The chosen events alone."""
        return replace(
            self,
            start=self.start[chosen],
            end=self.end[chosen],
            label=self.label[chosen],
            number=self.number[chosen],
        )

    def labelled(self, is_meant: Callable[[Label], object]) -> Mask:
        """Which events have such a label."""
        is_label_meant = np.array([bool(is_meant(label)) for label in self.labels], dtype=bool)
        return is_label_meant[self.label]

    def named(self, is_meant: Callable[[str], object]) -> Mask:
        """Which events have such a name."""
        return self.labelled(lambda label: is_meant(label.name))

    def of_kinds(self, kinds: Container[str]) -> Mask:
        """Which events have one of these kinds."""
        return self.labelled(lambda label: label.kind in kinds)

    def numbered(self, part: Callable[[Label], str]) -> tuple[NDArray[np.int64], list[str]]:
        """This part of the labels: for each event a place in the list of its values."""
        values, places = np.unique([part(label) for label in self.labels], return_inverse=True)
        return places[self.label], values.tolist()

    def shifted(self, shift_s: float) -> EventColumns:
        """With this added to all times."""
        return replace(
            self,
            start=self.start + shift_s,
            end=self.end + shift_s,
            differentiated=self.differentiated + shift_s,
        )

    def times(self) -> Intervals:
        """The starts and ends, as rows."""
        return np.stack([self.start, self.end], axis=1)

    def events(self) -> list[Event]:
        """All of them as `Event`s, which is slow for many."""
        rows = zip(
            self.start.tolist(),
            self.end.tolist(),
            self.label.tolist(),
            self.number.tolist(),
            strict=True,
        )
        return [
            Event(start, end, self.labels[label], self.details.get(number, NO_DETAILS))
            for start, end, label, number in rows
        ]


class ColumnBuilder:
    """Makes columns of the entries of a trace, part by part."""

    def __init__(self) -> None:
        self._labels: dict[tuple[str, str, int | str, int | str], int] = defaultdict(
            itertools.count().__next__
        )
        """Numbers of labels, by name, kind, process and thread."""
        self._places: list[NDArray[np.int32]] = []
        """One array for each part, like the times: the number of each event's label."""
        self._starts_us: list[NDArray[np.float64]] = []
        self._lasts_us: list[NDArray[np.float64]] = []
        """NaN: the entry has none."""
        self._details: dict[int, Details] = {}
        self._differentiated_us: list[float] = []
        self._num_events = 0

    def add(self, entries: Sequence[TraceEntry]) -> None:
        """Append the ranges of a part of the trace."""
        ranges = [entry for entry in entries if entry.ph == "X"]
        places = [self._labels[entry.name, entry.cat, entry.pid, entry.tid] for entry in ranges]
        starts_us = [entry.ts for entry in ranges]
        lasts_us = [entry.dur for entry in ranges]
        self._places.append(np.array(places, dtype=np.int32))
        self._starts_us.append(np.array(starts_us, dtype=np.float64))
        self._lasts_us.append(np.array(lasts_us, dtype=np.float64))

        for entry in entries:
            if entry.cat == TO_BACKWARD and entry.ph == "s":
                self._differentiated_us.append(entry.ts or 0.0)

        for number, entry in enumerate(ranges, start=self._num_events):
            # Operations on the host, which most events are, have none that are read.
            if entry.cat != "cpu_op":
                self._details[number] = decoded(entry.args, Details)

        self._num_events += len(ranges)

    def columns(self) -> EventColumns:
        """What was added, in the order of starts."""
        starts_us = np.concatenate(self._starts_us)
        lasts_us = np.concatenate(self._lasts_us)
        starts = starts_us / 1e6
        ends = (starts_us + lasts_us) / 1e6
        is_range = _are_times(starts_us) & _are_times(lasts_us)
        order = np.lexsort((-ends, starts))
        order = order[is_range[order]]

        return EventColumns(
            start=starts[order],
            end=ends[order],
            label=np.concatenate(self._places)[order],
            number=order,
            labels=[
                Label(name, kind, f"{process}:{thread}")
                for name, kind, process, thread in self._labels
            ],
            details=self._details,
            differentiated=np.array(self._differentiated_us, dtype=np.float64) / 1e6,
        )


def _are_times(numbers_us: NDArray[np.float64]) -> Mask:
    """Which of these are numbers of microseconds in a trace."""
    return (numbers_us >= 0) & (numbers_us < MOST_US)


def read_events(
    path: Path, then: Callable[[Sequence[TraceEntry], int], None] | None = None
) -> tuple[EventColumns, int]:
    """The ranges of a trace, and the Unix time in ns that they are relative to. `then` gets all
    entries and this time, part by part, and may change them. Raises OSError for a file that cannot
    be read, ValueError for one that is no trace."""
    builder = ColumnBuilder()
    base_ns = 0
    for entries, base_ns in read_parts(path):
        builder.add(entries)
        if then is not None:
            then(entries, base_ns)

    return builder.columns(), base_ns


def from_events(columns: EventColumns, base_ns: int) -> RankTrace:
    """What a breakdown needs of a trace."""
    gloo_threads = {label.thread for label in columns.labels if label.name.startswith("gloo:")}
    is_host = columns.labelled(
        lambda label: label.kind == "cpu_op" and label.thread not in gloo_threads
    )
    host = columns.where(is_host)
    operations = host.where(host.named(is_compute))

    is_data = columns.named(lambda name: name == DATA_MARK or LOADER_NEXT.match(name))
    data = union(columns.where(is_data).times())

    is_device = any(label.kind == "kernel" for label in columns.labels)
    if is_device:
        is_work = columns.of_kinds(ON_DEVICE) & ~columns.named(is_communication)
        work = columns.where(is_work)
        seconds = work.end - work.start
        compute = union(work.times())
        launches = _launches(columns, work)
    else:
        # What makes a batch is data.
        num_edges_before = np.searchsorted(data.reshape(-1), operations.start, "right")
        work = operations.where(num_edges_before % 2 == 0)
        seconds = _self_times(work)
        compute = difference(union(work.times()), data)
        launches = np.empty((0, 3))

    steps = tuple(_steps(columns, work, launches))
    is_backward = host.named(lambda name: name.startswith(NODE))
    is_differentiated = np.isin(host.start, columns.differentiated)
    is_clipping = host.named(lambda name: name in CLIPS)
    is_accumulation = host.named(lambda name: name == ACCUMULATES)

    return RankTrace(
        base_ns=base_ns,
        is_device=is_device,
        steps=steps,
        compute=compute,
        data=data,
        collectives=tuple(_collectives(columns, host)),
        syncs=tuple(_syncs(columns)) if is_device else (),
        backward=union(host.where(is_backward).times()),
        host_operations=union(operations.times()),
        differentiated=union(host.where(is_differentiated).times()),
        clippings=np.sort(host.start[is_clipping]),
        gradients=np.sort(host.end[is_accumulation]),
        launches=launches,
        operations=tuple(_operation_times(work, seconds, steps)),
    )


def _launches(columns: EventColumns, kernels: EventColumns) -> NDArray[np.float64]:
    """For each kernel: when the host launched it, its start and its end."""
    calls = columns.where(columns.of_kinds(LAUNCHES))
    launches = {call.details.correlation: call.start for call in calls.events()}
    rows = []
    for kernel in kernels.events():
        launch = launches.get(kernel.details.correlation, kernel.start)
        rows.append((launch, kernel.start, kernel.end))

    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def is_compute(name: str) -> bool:
    """Whether an operation on the CPU is work. Nodes of Python functions are not, as they may wait
    for a collective; the operations inside them are."""
    if name.startswith((NODE, "c10d::", "_c10d_functional")):
        return False
    return "::" in name or OF_TORCH.search(name) is not None


def is_communication(name: str) -> bool:
    """Whether a kernel is one of NCCL."""
    return "nccl" in name[:5]


def _steps(
    columns: EventColumns,
    work: EventColumns,
    launches: NDArray[np.float64],
) -> Iterator[TraceStep]:
    """A step lasts until the next one starts. On a GPU it starts with the first kernel that it
    launches on the stream that computes most: the host may be ahead by whole steps."""
    host_starts: dict[int, float] = {}
    is_mark = columns.named(lambda name: name.startswith(STEP_MARK))
    for event in columns.where(is_mark & columns.of_kinds({"user_annotation"})).events():
        number = whole_number(event.name.removeprefix(STEP_MARK))
        if number is not None:
            host_starts.setdefault(number, event.start)

    ends = columns.end[columns.named(lambda name: name == END_MARK)]
    if not host_starts or not len(ends):
        raise ValueError("it has no steps, or no end of the last one")

    starts = list(host_starts.values())
    if len(launches):
        starts = _device_starts(starts, work, launches)

    edges = [*starts, float(ends[-1])]
    if any(later <= earlier for earlier, later in itertools.pairwise(edges)):
        raise ValueError("its steps are not in order")

    for number, (start, end) in zip(host_starts, itertools.pairwise(edges), strict=True):
        yield TraceStep(number, start, end)


def _device_starts(
    host_starts: list[float],
    work: EventColumns,
    launches: NDArray[np.float64],
) -> list[float]:
    """When the GPU began each step; as on the host if a step has no kernel."""
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


def _self_times(nested: EventColumns) -> NDArray[np.float64]:
    """The seconds of each operation, less those inside it."""
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


def _outer_places(rows: EventColumns, is_first: Mask) -> NDArray[np.int64]:
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
    work: EventColumns, seconds: NDArray[np.float64], steps: Sequence[TraceStep]
) -> Iterator[OperationTime]:
    """The time of each operation in each step."""
    starts = np.array([step.start for step in steps])
    ends = np.array([step.end for step in steps])
    step_places = np.searchsorted(starts, work.start, "right") - 1
    is_in_step = (step_places >= 0) & (work.start < ends[step_places])

    # One key for each pair of a step and a name.
    name_places, names = work.numbered(lambda label: label.name)
    keys = step_places * len(names) + name_places
    keys = keys[is_in_step]
    totals_s = np.bincount(keys, seconds[is_in_step])
    calls = np.bincount(keys)

    for key in np.flatnonzero(calls).tolist():
        step_place, name_place = divmod(key, len(names))
        yield OperationTime(
            name=names[name_place],
            step=steps[step_place].number,
            seconds=float(totals_s[key]),
            calls=int(calls[key]),
        )


def _collectives(columns: EventColumns, host: EventColumns) -> list[CollectiveCall]:
    """Calls on the host and the library's work, which begin in the same order, are joined."""
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
    accumulations: dict[str, list[Event]] = defaultdict(list)
    for event in host.where(is_accumulation).events():
        accumulations[event.label.thread].append(event)

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
    accumulations: Mapping[str, Sequence[Event]],
) -> CollectiveCall:
    """`accumulations`: where the gradients of parameters are accumulated, by thread."""
    count = work.details.num_items
    num_bytes = 0
    if isinstance(count, int) and 0 < count < 1 << 50:
        num_bytes = count * ITEM_BYTES.get(str(work.details.dtype), 0)

    host_call = None
    joined = work.start
    is_bucket = False
    if call is not None:
        host_call = call.start
        of_thread = accumulations.get(call.label.thread, ())
        is_bucket = kind == "allreduce" and _is_inside(call, of_thread)
        if work.label.kind != "kernel":  # which a rank joins when it starts
            joined = call.start

    group = work.details.group
    return CollectiveCall(
        kind=f"{kind}:{group}" if isinstance(group, str) else kind,
        call=joined,
        start=work.start,
        end=work.end,
        host_call=host_call,
        is_bucket=is_bucket,
        num_bytes=num_bytes,
    )


def _is_inside(call: Event, ranges: Sequence[Event]) -> bool:
    """Whether the call is in the last of these ranges that began before it."""
    place = bisect_right(ranges, call.start, key=lambda event: event.start)
    return place > 0 and call.end <= ranges[place - 1].end


def _kind_of_work(name: str) -> str:
    """`allreduce` of `gloo:all_reduce` and of `ncclDevKernel_AllReduce_Sum_f32_RING_LL`."""
    if name.startswith("gloo:"):
        return _plain(name[5:])
    return _plain(name.split("_")[1] if "_" in name else name)


def _plain(name: str) -> str:
    """The letters of a name, in lower case."""
    return re.sub(r"[^a-z]", "", name.lower())


def _syncs(columns: EventColumns) -> list[Event]:
    """Those of the steps, by the host's time, but not of the profiler's own end."""
    is_step = columns.named(lambda name: name.startswith(STEP_MARK))
    is_end = columns.named(lambda name: name == END_MARK)
    first_start = columns.start[is_step].min(initial=np.inf)
    last_end = columns.start[is_end].max(initial=-np.inf)
    is_within = (columns.start >= first_start) & (columns.start < last_end)

    is_long = columns.end - columns.start > BLOCKING_COPY_S
    is_blocking_copy = columns.named(lambda name: name == "cudaMemcpyAsync") & is_long
    is_wait = columns.named(lambda name: name in WAITS)
    is_call = columns.of_kinds({"cuda_runtime"})
    return columns.where(is_call & (is_blocking_copy | is_wait) & is_within).events()
