"""Which ranks are on one node: those that can read each other's watch folder and /proc. Pure reasoning.

A host's name alone does not tell: containers on two machines may have the same one, and so have two launchers on one
machine, each with a rank whose local number is 0. So ranks are first grouped by the machine (and the process
namespace) that they see, then each group is split by its local numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Standing:
    """Where a rank stands."""

    host: str
    machine: str
    local_rank: int


def this_machine() -> str:
    """The same for two processes if they see each other in /proc."""
    try:
        return f"{BOOT.read_text(encoding='utf-8').strip()}/{PROCESSES.stat().st_ino}"
    except OSError:  # no Linux, or nothing to see: then the name of the host must do
        return ""


def group_by_node(standings: Mapping[int, Standing]) -> list[tuple[int, ...]]:
    """The ranks of every node, its first one first: that is the rank with the lowest local number, which leads there.
    Nodes are in the order of their lowest ranks."""
    machines: dict[tuple[str, str], list[int]] = {}
    for rank, one in sorted(standings.items()):
        machines.setdefault((one.host, one.machine), []).append(rank)
    nodes = [node for ranks in machines.values() for node in _split(ranks, standings)]
    return sorted(nodes, key=min)


def _split(ranks: list[int], standings: Mapping[int, Standing]) -> list[tuple[int, ...]]:
    """Ranks of one machine: as many nodes as there are ranks with its lowest local number."""
    by_local: dict[int, list[int]] = {}
    for rank in ranks:
        by_local.setdefault(standings[rank].local_rank, []).append(rank)
    lowest = min(by_local)
    nodes = {leader: [leader] for leader in by_local.pop(lowest)}
    # torchrun numbers a node's ranks in a row; srun may deal them out in turn.
    first = {rank: rank - standings[rank].local_rank + lowest for rank in ranks}
    in_a_row = set(first.values()) <= nodes.keys()
    leaders = list(nodes)
    for _, same in sorted(by_local.items()):
        for position, rank in enumerate(same):
            nodes[first[rank] if in_a_row else leaders[position % len(leaders)]].append(rank)
    return [tuple(node) for node in nodes.values()]
