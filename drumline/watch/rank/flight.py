"""What a rank's flight recorder has: the latest collectives of each group. The only file that uses torch's private
functions for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drumline.watch.rank.stacks import awaited_workers, own_calls

NUM_LATEST = 16
# NCCL has a recorder of its own; the other one has gloo's collectives.
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def dump_flight() -> dict[str, Any]:
    """`{"collectives": [...]}`, records with the fields of facts.Collective, the newest last; empty when there is no
    process group. Does not load torch: a process without it has nothing to tell."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return {}
    functions = sys.modules.get("torch._C._distributed_c10d")
    entries = []
    for name in RECORDERS:
        if dump := getattr(functions, name, None):
            entries += json.loads(dump(True, False)).get("entries", [])
    return {"collectives": latest(entries)}


def latest(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest of each group, all in the order in which they began."""
    by_group: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in sorted(entries, key=lambda entry: int(entry["time_created_ns"])):
        if not entry.get("is_p2p"):
            by_group.setdefault((_group(entry), _backend(entry)), []).append(entry)
    kept = [entry for group in by_group.values() for entry in group[-NUM_LATEST:]]
    names = [group for group, _ in by_group]
    kept.sort(key=lambda entry: int(entry["time_created_ns"]))
    # A group for devices and CPU has two backends, each with numbers of its own.
    return [_collective(entry, is_double=names.count(_group(entry)) > 1) for entry in kept]


def answer(folder: Path, rank: int, number: int) -> None:
    """Write what there is to the file that the sidecar waits for, whole or not at all."""
    path = folder / f"rank-{rank:05d}.flight.json"
    new = path.with_suffix(".new")
    own = {"number": number, "calls": own_calls(), "workers": [], "collectives": []}
    new.write_text(json.dumps({**own, **_dump_guarded()}), encoding="utf-8")
    new.replace(path)


def _dump_guarded() -> dict[str, Any]:
    """That Python answers is worth telling, whatever became of torch's private functions."""
    try:
        return {"workers": awaited_workers(), **dump_flight()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _collective(entry: dict[str, Any], *, is_double: bool) -> dict[str, Any]:
    return {
        "group": f"{_group(entry)} of {_backend(entry)}" if is_double else _group(entry),
        "number": int(entry["collective_seq_id"]),
        "op": str(entry["profiling_name"]).rpartition(":")[2],
        "sizes": entry["input_sizes"],
        # Entries of gloo never get beyond `scheduled`.
        "is_done": bool(entry["retired"]) or entry["state"] == "completed",
    }


def _group(entry: dict[str, Any]) -> str:
    """Its name; torch gives a number to one that the user left without."""
    number, name = entry["process_group"]
    return str(name if name not in ("", "undefined") else number)


def _backend(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[0]
