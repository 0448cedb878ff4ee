"""Ranks by number, as they are written in sentences. Without torch: the sidecar of the watch writes such sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

MOST_HOSTS = 4


def ranks_text(ranks: Sequence[int]) -> str:
    """`0, 1, 4-7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def by_rank(values: Sequence[Any], hosts: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """`rank 0, 2 (node-a): 5; rank 1 (node-b): 7`, the most common value first. `ranks`: whose they are; all."""
    host_of = dict(zip(range(len(hosts)) if ranks is None else ranks, hosts, strict=True))
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, value in zip(host_of, values, strict=True):
        groups[_short(value)].append(rank)
    return "; ".join(
        f"rank {ranks_text(group)} ({some(sorted({host_of[rank] for rank in group}))}): {value}"
        for value, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    )


def some(names: Sequence[str]) -> str:
    """`a, b, c, d and 60 more`."""
    more = len(names) - MOST_HOSTS
    return ", ".join(names) if more < 2 else f"{', '.join(names[:MOST_HOSTS])} and {more} more"


def _short(value: Any, *, limit: int = 200) -> str:
    text = str(value)
    if len(text) <= limit:
        return text
    import blake3  # a sidecar seldom needs it

    return f"{text[:limit]}... ({blake3.blake3(text.encode()).hexdigest(4)})"
