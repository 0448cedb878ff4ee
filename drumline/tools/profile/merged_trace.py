"""One trace of ranks by one clock, for https://ui.perfetto.dev: a process for each rank, and one
for its GPU.

Processes and flows have whole numbers, since Perfetto's importer takes text for hexadecimal and
drops flows that it cannot read. It also drops times before 0, and a kernel that begins before the
one before it on the stream has ended.
"""

from __future__ import annotations

import gzip
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from drumline.base.untrusted import replacing
from drumline.runs.profile_files import MERGED_FILE, MOST_RANKS_MERGED, trace_path
from drumline.tools.profile.trace_entries import TraceEntry, read_trace
from drumline.tools.profile.trace_file import ON_DEVICE, RankTrace

PROCESSES = 100
"""Numbers of processes for each rank: its own, its GPU's streams. They begin at 100: Perfetto takes
0 for the idle process, and shows it last."""
EARLY_US = 3.6e9
"""An hour for what comes before the instant that all ranks share: Perfetto drops times before 0."""

LINES_AT_ONCE = 1000


def write_merged(folder: Path, hosts: Mapping[int, str], traces: Mapping[int, RankTrace]) -> Path:
    """Write it beside the traces of these ranks; of more than `MOST_RANKS_MERGED`, it has the first
    ones."""
    path = folder / MERGED_FILE
    encode = msgspec.json.Encoder().encode
    with replacing(path) as file, gzip.open(file, "wb", compresslevel=1) as packed:
        packed.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = b""
        for rank in sorted(hosts)[:MOST_RANKS_MERGED]:
            trace = read_trace(trace_path(folder, rank))
            shift_us = EARLY_US + traces[rank].shift_s * 1e6
            cut_us = cut_durations(trace.entries()) if traces[rank].is_device else {}
            entries = renumbered(trace.entries(), rank, hosts[rank], shift_us, cut_us)
            lines = map(encode, entries)
            # A write costs as much as a line.
            while part := list(itertools.islice(lines, LINES_AT_ONCE)):
                packed.write(separator + b",\n".join(part))
                separator = b",\n"
        packed.write(b"\n]}\n")
    return path


def renumbered(
    entries: Iterable[TraceEntry],
    rank: int,
    host: str,
    shift_us: float,
    cut_us: Mapping[int, float],
) -> Iterator[TraceEntry]:
    """A rank's entries, with processes, flows and times that do not clash with those of other
    ranks. The profiler's own rows, whose process is no number, are left out. Ids of flows stay
    whole numbers, which Perfetto needs to join them. `cut_us`: shorter durations, by position.
    """
    numbers: dict[int, int] = {}
    for position, entry in enumerate(entries):
        process = entry.pid
        if not isinstance(process, int):
            continue
        is_name = entry.ph == "M"
        is_kept = entry.name == "thread_name" if is_name else entry.ts is not None
        if not is_kept:
            continue
        # The rank's own process is the first that its trace names.
        entry.pid = numbers.setdefault(
            process, (rank + 1) * PROCESSES + min(len(numbers), PROCESSES - 1)
        )
        if not is_name and entry.ts is not None:
            entry.ts += shift_us
        if isinstance(entry.id, int):
            entry.id += rank << 40
        entry.dur = cut_us.get(position, entry.dur)
        yield entry
    for process, number in numbers.items():
        what = f"rank {rank} on {host}" + (f", GPU {process}" if number % PROCESSES else "")
        yield process_fact(number, "process_name", {"name": what})
        yield process_fact(number, "process_sort_index", {"sort_index": number})


def process_fact(number: int, name: str, facts: Mapping[str, Any]) -> TraceEntry:
    arguments = msgspec.Raw(msgspec.json.encode(facts))
    return TraceEntry(ph="M", name=name, pid=number, tid=0, ts=0.0, args=arguments)


def cut_durations(entries: Iterable[TraceEntry]) -> dict[int, float]:
    """Durations, by position, of kernels that end after the next one of their stream has begun,
    which Perfetto would drop: up to where that begins."""
    streams: dict[tuple[int | str, int | str], list[tuple[float, float, int]]] = defaultdict(list)
    for position, entry in enumerate(entries):
        is_kernel = entry.cat in ON_DEVICE and entry.ph == "X"
        if is_kernel and entry.ts is not None and entry.dur is not None:
            streams[entry.pid, entry.tid].append((entry.ts, entry.dur, position))
    durations_us = {}
    for kernels in streams.values():
        for (start_us, lasts_us, position), (next_us, _, _) in pairwise(sorted(kernels)):
            room_us = next_us - start_us
            if lasts_us > room_us:
                durations_us[position] = room_us
    return durations_us
