"""Reads torch.profiler's trace of one rank, part by part, into columns. An entry of a trace:

{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4711, "tid": 4711,
 "ts": 1718182800123.4, "dur": 51.2, "args": {"External id": 17}}
"""

from __future__ import annotations

import gzip
import itertools
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from drumline.base.untrusted import DOCUMENT_BYTES, open_regular
from drumline.tools.profile.intervals import Integers, Intervals, Mask, Numbers

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


class TracePart(msgspec.Struct):
    """A trace, or some of its entries."""

    entries: list[TraceEntry] = msgspec.field(name="traceEvents")
    base_ns: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = msgspec.field(
        name="baseTimeNanoseconds", default=0
    )
    """The Unix time that its times are relative to."""


PART = msgspec.json.Decoder(TracePart)
OPENING = b'{"traceEvents": ['
CLOSING = b"]}"
BETWEEN = b"\n  },\n  {"
"""Between two entries, as torch writes them: no text in JSON has a line break. A trace that somebody
else wrote in another way is decoded in one part."""


def read_parts(path: Path) -> Iterator[TracePart]:
    """A torch.profiler trace in parts, each with the base time of the trace, which has a hundred MB for
    some steps: arguments stay as they are until somebody asks for them.

    Raises OSError for a file that cannot be read, ValueError for one that is no trace."""
    base_ns = 0
    for content in _documents(path):
        try:
            part = PART.decode(content)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"it is no trace: {error}") from None

        base_ns = part.base_ns or base_ns  # torch writes it before the entries
        part.base_ns = base_ns
        yield part


def _documents(path: Path) -> Iterator[bytes]:
    """The trace as documents with some of its entries each: the file is cut between two entries, and
    each part is closed as if it were a trace of its own."""
    document = bytearray()
    num_values = 0
    for content in unpacked(path):
        place = content.rfind(BETWEEN)
        if place < 0:
            document += content
            num_values += content.count(b"{") + content.count(b"[")
            check_values(num_values, len(document))
            continue

        entry_end = place + len(b"\n  }")
        yield bytes(document + content[:entry_end] + CLOSING)
        next_entry = entry_end + len(b",")
        document = bytearray(OPENING + content[next_entry:])
        num_values = 0

    yield bytes(document)


def check_values(num_values: int, size: int) -> None:
    """Refuses a part of a trace that would be many times as large in memory."""
    if num_values * BYTES_PER_VALUE > size + SMALL_BYTES:
        raise ValueError(
            f"it has {num_values:,} objects and lists in {size:,} bytes, more than a trace"
        )


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


MOST_US = 1e17
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
TO_BACKWARD = "fwdbwd"
"""The kind of the arrow from an operation to that of its gradient."""


class Details(msgspec.Struct, frozen=True):
    """Arguments of an event.

    Of a kernel `{"correlation": 5121}`, of gloo's work `{"In msg nelems": 1048576, "dtype": "Float"}`.
    """

    correlation: int | None = None
    num_items: int = msgspec.field(name="In msg nelems", default=0)
    dtype: str = ""
    group: str = msgspec.field(name="Process Group Name", default="")
    source: str = "unknown"
    """The line of a host sync."""


NO_DETAILS = Details()
DETAILS = msgspec.json.Decoder(Details)


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
        """As in `aten::mm`."""
        return self.label.name


@dataclass(frozen=True, kw_only=True)
class EventColumns:
    """The events of a trace by their starts, the outer before the inner ones. A trace has hundreds
    of thousands: few of them become an `Event`."""

    start: Numbers
    end: Numbers
    label: NDArray[np.int32]
    """Places in `labels`."""
    number: Integers
    """Their keys in `details`."""
    labels: list[Label]
    details: Mapping[int, Details]
    """Of those that have any."""
    differentiated: Numbers
    """When operations began that have one in the backward pass."""
    base_ns: int
    """The Unix time that all times are relative to."""

    def __len__(self) -> int:
        """The number of events."""
        return len(self.start)

    def where(self, chosen: Mask | Integers) -> EventColumns:
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
        is_label_meant = [bool(is_meant(label)) for label in self.labels]
        return np.array(is_label_meant, dtype=bool)[self.label]

    def named(self, is_meant: Callable[[str], object]) -> Mask:
        """Which events have such a name."""
        return self.labelled(lambda label: is_meant(label.name))

    def of_kinds(self, kinds: Container[str]) -> Mask:
        """Which events have one of these kinds."""
        return self.labelled(lambda label: label.kind in kinds)

    def numbered(self, part: Callable[[Label], str]) -> tuple[Integers, list[str]]:
        """This part of the labels: for each event a place in the list of its values. Names of three events,
        `mm`, `relu` and `mm`, are the places 0, 1 and 0 in ['mm', 'relu']."""
        parts = [part(label) for label in self.labels]
        values, places = np.unique(parts, return_inverse=True)
        return places[self.label], values.tolist()

    def shifted(self, shift_s: float) -> EventColumns:
        """The same instants, relative to an earlier base time."""
        return replace(
            self,
            start=self.start + shift_s,
            end=self.end + shift_s,
            differentiated=self.differentiated + shift_s,
            base_ns=self.base_ns - round(shift_s * 1e9),
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


def columns_of(parts: Iterable[TracePart]) -> EventColumns:
    """The ranges of a trace, in the order of their starts. Those without a time are left out."""
    label_numbers: dict[tuple[str, str, int | str, int | str], int] = defaultdict(
        itertools.count().__next__
    )
    rows: list[Numbers] = []
    details: dict[int, Details] = {}
    differentiated_us: list[float] = []

    base_ns = 0
    num_events = 0
    for part in parts:
        base_ns = part.base_ns
        ranges = [entry for entry in part.entries if entry.ph == "X"]
        # Of each its start, how long it lasts (NaN: the entry has none), and the number of its label.
        ranges_of_part = [
            (entry.ts, entry.dur, label_numbers[entry.name, entry.cat, entry.pid, entry.tid])
            for entry in ranges
        ]
        rows.append(np.array(ranges_of_part, dtype=np.float64).reshape(-1, 3))

        for entry in part.entries:
            if entry.cat == TO_BACKWARD and entry.ph == "s":
                differentiated_us.append(entry.ts or 0.0)

        for number, entry in enumerate(ranges, start=num_events):
            # Operations on the host, which most events are, have none that are read.
            if entry.cat != "cpu_op":
                details[number] = DETAILS.decode(entry.args)

        num_events += len(ranges)

    starts_us, lasts_us, labels = np.concatenate(rows).T
    starts = starts_us / 1e6
    ends = (starts_us + lasts_us) / 1e6
    is_range = _are_times(starts_us) & _are_times(lasts_us)
    order = np.lexsort((-ends, starts))
    order = order[is_range[order]]

    return EventColumns(
        start=starts[order],
        end=ends[order],
        label=labels[order].astype(np.int32),
        number=order,
        labels=[
            Label(name, kind, f"{process}:{thread}")
            for name, kind, process, thread in label_numbers
        ],
        details=details,
        differentiated=np.array(differentiated_us, dtype=np.float64) / 1e6,
        base_ns=base_ns,
    )


def _are_times(numbers_us: Numbers) -> Mask:
    """Which of these are numbers of microseconds in a trace."""
    return (numbers_us >= 0) & (numbers_us < MOST_US)
