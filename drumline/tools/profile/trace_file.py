"""Reads torch.profiler's trace of one rank, part by part, into columns.

A trace is a file of a run folder: what does not have the expected type is left out.
"""

from __future__ import annotations

import gzip
import itertools
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from drumline.base.untrusted import DOCUMENT_BYTES, open_regular
from drumline.tools.profile.intervals import Intervals

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
TO_BACKWARD = "fwdbwd"
"""The kind of the arrow from an operation to that of its gradient."""


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
        self._rows: list[NDArray[np.float64]] = []
        """One array for each part: the start of each event, how long it lasts (NaN: the entry has none),
        and the number of its label."""
        self._details: dict[int, Details] = {}
        self._differentiated_us: list[float] = []
        self._num_events = 0

    def add(self, entries: Sequence[TraceEntry]) -> None:
        """Append the ranges of a part of the trace."""
        ranges = [entry for entry in entries if entry.ph == "X"]
        rows = [
            (entry.ts, entry.dur, self._labels[entry.name, entry.cat, entry.pid, entry.tid])
            for entry in ranges
        ]
        self._rows.append(np.array(rows, dtype=np.float64).reshape(-1, 3))

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
        starts_us, lasts_us, labels = np.concatenate(self._rows).T
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
