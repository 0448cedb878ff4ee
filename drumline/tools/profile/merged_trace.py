"""One trace of ranks by one clock, for https://ui.perfetto.dev: a process for each rank, and one
for its GPU. It is written while the traces of the ranks are read.

Processes and flows have whole numbers, since Perfetto's importer takes text for hexadecimal and
drops flows that it cannot read. It also drops times before 0, and a kernel that begins before the
one before it on the stream has ended.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from drumline.base.untrusted import replacing
from drumline.runs.profile_files import MERGED_FILE, MOST_RANKS_MERGED
from drumline.tools.profile.trace_file import ON_DEVICE, TraceEntry

PROCESSES = 100
"""Numbers of processes for each rank: its own, its GPU's streams. They begin at 100: Perfetto takes
0 for the idle process, and shows it last."""
EARLY_US = 3.6e9
"""An hour for what comes before the instant that all ranks share: Perfetto drops times before 0."""
GZIP = 31
"""As zlib calls the format."""


@contextmanager
def merged_trace(folder: Path) -> Iterator[MergedTrace]:
    """Write it beside the traces of the ranks."""
    with replacing(folder / MERGED_FILE) as file:
        merged = MergedTrace(file)
        yield merged
        merged.finish()


class MergedTrace:
    """The file. Of more than `MOST_RANKS_MERGED` ranks, it has the first ones."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._packer = zlib.compressobj(level=1, wbits=GZIP)
        self._encoder = msgspec.json.Encoder()
        self._num_ranks = 0
        self._separator = b""
        self._write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')

    @contextmanager
    def adding(self, rank: int, host: str) -> Iterator[MergedRank]:
        """A rank; of one whose trace turns out to be none, what was read of it."""
        added = MergedRank(self, rank, host)
        try:
            yield added
        finally:
            added.finish()
            self._num_ranks += 1

    def write(self, entries: Sequence[TraceEntry]) -> None:
        if entries and self._num_ranks < MOST_RANKS_MERGED:
            self._write(self._separator)
            self._write(memoryview(self._encoder.encode(entries))[1:-1])
            self._separator = b",\n"

    def finish(self) -> None:
        self._write(b"\n]}\n")
        self._file.write(self._packer.flush())

    def _write(self, content: bytes | memoryview) -> None:
        self._file.write(self._packer.compress(content))


class MergedRank:
    """A rank's entries, with processes, flows and times that do not clash with those of other
    ranks. The profiler's own rows, whose process is no number, are left out. Ids of flows stay
    whole numbers, which Perfetto needs to join them."""

    def __init__(self, merged: MergedTrace, rank: int, host: str) -> None:
        self._merged = merged
        self._rank = rank
        self._host = host
        self._numbers: dict[int, int] = {}
        self._kernels: list[TraceEntry] = []

    def add(self, entries: Sequence[TraceEntry], shift_s: float) -> None:
        """Changes the entries. Kernels wait for those that follow them on their stream."""
        shift_us = EARLY_US + shift_s * 1e6
        written = []
        for entry in entries:
            process = entry.pid
            if not isinstance(process, int):
                continue
            if entry.ph == "M":
                if entry.name != "thread_name":
                    continue
            elif entry.ts is None:
                continue
            else:
                entry.ts += shift_us
            entry.pid = self._numbers.get(process) or self._new_number(process)
            if isinstance(entry.id, int):
                entry.id += self._rank << 40
            if entry.cat in ON_DEVICE:
                entry.args = entry.args.copy()  # not the whole part that it was read with
                self._kernels.append(entry)
            else:
                written.append(entry)
        self._merged.write(written)

    def _new_number(self, process: int) -> int:
        """The rank's own process is the first that its trace names."""
        number = (self._rank + 1) * PROCESSES + min(len(self._numbers), PROCESSES - 1)
        self._numbers[process] = number
        return number

    def finish(self) -> None:
        cut_kernels(self._kernels)
        self._merged.write(self._kernels)
        names = []
        for process, number in self._numbers.items():
            gpu = f", GPU {process}" if number % PROCESSES else ""
            what = f"rank {self._rank} on {self._host}{gpu}"
            names.append(process_fact(number, "process_name", {"name": what}))
            names.append(process_fact(number, "process_sort_index", {"sort_index": number}))
        self._merged.write(names)


def process_fact(number: int, name: str, facts: Mapping[str, Any]) -> TraceEntry:
    arguments = msgspec.Raw(msgspec.json.encode(facts))
    return TraceEntry(ph="M", name=name, pid=number, tid=0, ts=0.0, args=arguments)


def cut_kernels(kernels: Sequence[TraceEntry]) -> None:
    """A kernel that ends after the next one of its stream has begun, which Perfetto would drop,
    lasts until that begins."""
    streams: dict[tuple[int | str, int | str], list[tuple[float, float, int]]] = defaultdict(list)
    for position, kernel in enumerate(kernels):
        if kernel.ts is not None and kernel.dur is not None and kernel.ph == "X":
            streams[kernel.pid, kernel.tid].append((kernel.ts, kernel.dur, position))
    for rows in streams.values():
        for (start_us, lasts_us, position), (next_us, _, _) in pairwise(sorted(rows)):
            kernels[position].dur = min(lasts_us, next_us - start_us)
