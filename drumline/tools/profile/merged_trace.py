"""One trace of ranks by one clock, for https://ui.perfetto.dev: a process for each rank, and one
for its GPU.

Processes and flows have whole numbers, since Perfetto's importer takes text for hexadecimal and
drops flows that it cannot read. It also drops times before 0, and a kernel that begins before the
one before it on the stream has ended.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from drumline.base.untrusted import replacing
from drumline.runs.profile_files import MERGED_FILE, MOST_RANKS_MERGED, trace_path
from drumline.tools.profile.trace_file import ON_DEVICE, read_entries

PROCESSES = 100
"""Numbers of processes for each rank: its own, its GPU's streams. They begin at 100: Perfetto takes
0 for the idle process, and shows it last."""
EARLY_US = 3.6e9
"""An hour for what comes before the instant that all ranks share: Perfetto drops times before 0."""


def write_merged(folder: Path, hosts: Mapping[int, str], base_ns: Mapping[int, int]) -> Path:
    """Write it beside the traces of these ranks; of more than `MOST_RANKS_MERGED`, it has the first
    ones. `base_ns`: the same instant by the clock of each rank."""
    path = folder / MERGED_FILE
    with replacing(path) as file, gzip.open(file, "wb", compresslevel=1) as packed:
        packed.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = b""
        for rank in sorted(hosts)[:MOST_RANKS_MERGED]:
            entries, own_ns = read_entries(trace_path(folder, rank))
            for entry in renumbered(
                entries, rank, hosts[rank], EARLY_US + (own_ns - base_ns[rank]) / 1e3
            ):
                packed.write(separator + json.dumps(entry).encode())
                separator = b",\n"
        packed.write(b"\n]}\n")
    return path


def renumbered(
    entries: Sequence[Any], rank: int, host: str, shift_us: float
) -> Iterator[dict[str, Any]]:
    """A rank's entries, with processes, flows and times that do not clash with those of other
    ranks. The profiler's own rows, whose process is no number, are left out. Ids of flows stay
    whole numbers, which Perfetto needs to join them.
    """
    numbers: dict[int, int] = {}
    cut_us = cut_durations(entries)
    for position, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(process := entry.get("pid"), int):
            continue
        is_name = entry.get("ph") == "M"
        flow = entry.get("id")
        is_kept = (
            entry.get("name") == "thread_name"
            if is_name
            else isinstance(entry.get("ts"), int | float)
        )
        if not is_kept:
            continue
        # The rank's own process is the first that its trace names.
        number = numbers.setdefault(
            process, (rank + 1) * PROCESSES + min(len(numbers), PROCESSES - 1)
        )
        own_flow = {"id": (rank << 40) + flow} if isinstance(flow, int) else {}
        times = {} if is_name else {"ts": entry["ts"] + shift_us}
        if position in cut_us:
            times["dur"] = cut_us[position]
        yield {**entry, "pid": number, **times, **own_flow}
    for process, number in numbers.items():
        what = f"rank {rank} on {host}" + (f", GPU {process}" if number % PROCESSES else "")
        common = {"ph": "M", "pid": number, "tid": 0, "ts": 0}
        yield {**common, "name": "process_name", "args": {"name": what}}
        yield {**common, "name": "process_sort_index", "args": {"sort_index": number}}


def cut_durations(entries: Sequence[Any]) -> dict[int, float]:
    """Durations, by position, of kernels that end after the next one of their stream has begun,
    which Perfetto would drop: up to where that begins."""
    streams: dict[tuple[int, int], list[int]] = defaultdict(list)
    for position, entry in enumerate(entries):
        if isinstance(entry, dict) and entry.get("cat") in ON_DEVICE and entry.get("ph") == "X":
            streams[entry["pid"], entry["tid"]].append(position)
    durations_us = {}
    for positions in streams.values():
        for before, after in pairwise(
            sorted(positions, key=lambda position: entries[position]["ts"])
        ):
            room_us = entries[after]["ts"] - entries[before]["ts"]
            if entries[before]["dur"] > room_us:
                durations_us[before] = room_us
    return durations_us
