"""What a rank shows of itself when the sidecar asks: its Python stack, the DataLoader workers that
it waits for, and its flight recorder's latest collectives.

A thread of the rank answers. When none does, Python is blocked in the rank, and the sidecar sends a
signal: C code then writes the stacks, without Python's lock. In a rank whose threads run, that may
read a stack that is being changed, which ends the process. Workers that a rank forks have a signal
of their own, whose handler they register when they leave `fork`: the rank's handler would end a
process that is still in there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

# SIGUSR1 and SIGTERM mean preemption; the first real-time signals are used by C libraries and
# profilers.
STACK_SIGNAL = signal.SIGRTMIN + 7
WORKER_SIGNAL = signal.SIGRTMIN + 8
ANSWERING_THREAD = "drumline-answer"
REPORT_SUFFIX = "report.json"
MAX_CALLS = 48
NUM_COLLECTIVES = 16

# `fully_shard` calls variants of these: `_all_gather_base`, `reduce_scatter_tensor_coalesced`.
SHARDED = re.compile(r"^_?(all_gather|reduce_scatter)_\w+$")


def write_report(
    folder: Path,
    rank: int,
    number: int,
    torch_report: Callable[[], dict[str, Any]],
) -> None:
    """Answer the question of this number, in a file that appears whole or not at all.
    `torch_report`: the workers and collectives, where torch is loaded."""
    path = folder / f"rank-{rank:05d}.{REPORT_SUFFIX}"
    new = path.with_suffix(".new")
    report: dict[str, Any] = {"number": number, "calls": main_thread_calls()}

    # That Python answers is worth reporting, whatever became of torch's private functions.
    with contextlib.suppress(Exception):
        report.update(torch_report())

    new.write_text(json.dumps(report), encoding="utf-8")
    new.replace(path)


def register_stack_signals(path: Path) -> None:
    """From now on STACK_SIGNAL adds the stacks of all threads to this file. Only on the main
    thread."""
    # Opened to append: the reader empties the file, and the next stacks begin it again.
    file = path.open("a", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)

    # In a worker it is the main thread that gets the signal, and its own stack is enough.
    os.register_at_fork(
        after_in_child=lambda: faulthandler.register(
            WORKER_SIGNAL,
            file=file,
            all_threads=False,
            chain=False,
        )
    )

    # An abort in a library (gloo's, when shapes differ) ends Python without saying where.
    if not faulthandler.is_enabled():
        faulthandler.enable(file, all_threads=True)


def name_answering_thread() -> None:
    """Mark the calling thread, which only waits for questions, as the one to send the signal to: it
    may run while the main thread is blocked in the kernel, and no call of the main thread is
    interrupted."""
    try:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(
            ANSWERING_THREAD, encoding="utf-8"
        )
    except OSError:
        return  # then the main thread gets it


def main_thread_frames() -> Iterator[FrameType]:
    """The innermost first. The calling thread holds Python's lock, so they cannot change."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def main_thread_calls() -> list[tuple[str, int | None, str]]:
    """File, line and name of the main thread's calls, the innermost first."""
    frames = islice(main_thread_frames(), MAX_CALLS)
    return [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames]


def latest_collectives(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest of each group, all in the order in which they began."""
    by_backend: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for entry in sorted(entries, key=_began_ns):
        if not entry.get("is_p2p"):
            by_backend[_group_and_backend(entry)].append(entry)

    # A group for devices and CPU has two backends, each with numbers of its own.
    num_backends = Counter(group for group, _ in by_backend)
    latest = [entry for queue in by_backend.values() for entry in queue[-NUM_COLLECTIVES:]]

    records = []
    for entry in sorted(latest, key=_began_ns):
        group, backend = _group_and_backend(entry)
        record = {
            "group": f"{group} of {backend}" if num_backends[group] > 1 else group,
            "number": int(entry["collective_seq_id"]),
            "op": SHARDED.sub(r"\1", str(entry["profiling_name"]).rpartition(":")[2]),
            "sizes": entry["input_sizes"],
            # Entries of gloo never get beyond `scheduled`.
            "is_done": bool(entry["retired"]) or entry["state"] == "completed",
        }
        records.append(record)

    return records


def _began_ns(entry: dict[str, Any]) -> int:
    return int(entry["time_created_ns"])


def _group_and_backend(entry: dict[str, Any]) -> tuple[str, str]:
    """The name of the process group, or its number, and its backend."""
    number, name = entry["process_group"]
    is_unnamed = name in ("", "undefined")
    backend = str(entry["profiling_name"]).rpartition(":")[0]

    return str(number if is_unnamed else name), backend
