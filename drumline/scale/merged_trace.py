"""One trace of ranks by one clock, for https://ui.perfetto.dev: a process for each rank, and one for its GPU."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.scale.trace_file import read_entries
from drumline.untrusted import replacing
from drumline.watch.profile_files import MERGED_FILE, MOST_RANKS_MERGED, trace_path

PROCESSES = 100
"""Numbers of processes for each rank: its own, its GPU's streams."""


def write_merged(folder: Path, hosts: Mapping[int, str], shifts: Mapping[int, float]) -> Path:
    """Write it beside the traces of these ranks; of more than `MOST_RANKS_MERGED`, it has the first ones. `shifts`:
    what to add to each rank's times, in seconds."""
    path = folder / MERGED_FILE
    with replacing(path) as file, gzip.open(file, "wb", compresslevel=1) as packed:
        packed.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = b""
        for rank in sorted(hosts)[:MOST_RANKS_MERGED]:
            entries, _ = read_entries(trace_path(folder, rank))
            for entry in renumbered(entries, rank, hosts[rank], shifts[rank] * 1e6):
                packed.write(separator + json.dumps(entry).encode())
                separator = b",\n"
        packed.write(b"\n]}\n")
    return path


def renumbered(entries: Sequence[Any], rank: int, host: str, shift_us: float) -> Iterator[dict[str, Any]]:
    """A rank's entries, with processes, flows and times that do not clash with those of other ranks."""
    numbers: dict[Any, int] = {}
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("ph") == "M":
            if isinstance(entry, dict) and entry.get("name") == "thread_name" and "pid" in entry:
                yield {**entry, "pid": _number(numbers, entry["pid"], rank)}
            continue
        time, flow = entry.get("ts"), entry.get("id")
        if not isinstance(time, int | float) or entry.get("pid") in ("Spans", "Traces"):
            continue
        changed = {"pid": _number(numbers, entry.get("pid"), rank), "ts": time + shift_us}
        yield {**entry, **changed, **({} if flow is None else {"id": f"{rank}.{flow}"})}
    for process, number in numbers.items():
        what = f"rank {rank} on {host}" + (f", GPU {process}" if number % PROCESSES else "")
        common = {"ph": "M", "pid": number, "tid": 0, "ts": 0}
        yield {**common, "name": "process_name", "args": {"name": what}}
        yield {**common, "name": "process_sort_index", "args": {"sort_index": number}}


def _number(numbers: dict[Any, int], process: Any, rank: int) -> int:
    """The rank's own process is the first that its trace names."""
    key = str(process)
    return numbers.setdefault(key, rank * PROCESSES + min(len(numbers), PROCESSES - 1))
