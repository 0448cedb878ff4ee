"""Which ranks share a node, and by which address other nodes reach it. Nothing is sent.

Ranks of one node can read each other's watch folder and /proc. A host's name alone does not show that: containers on
two machines may have the same one, and two launchers on one machine do. So ranks are grouped by the machine (and
process namespace) that they see, then each group is split by its local ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from drumline.net.interfaces import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    gloo_interface,
    interface_towards,
    interfaces,
    nccl_interface,
)

BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    host: str
    machine: str
    local_rank: int


def this_machine() -> str:
    """The same for two processes if they see each other in /proc."""
    try:
        return f"{BOOT.read_text(encoding='utf-8').strip()}/{PROCESSES.stat().st_ino}"
    except OSError:  # not Linux, or hidden: then the host's name must do
        return ""


def outward_address(environment: Mapping[str, str], master_addr: str) -> str | None:
    """This host's address on the network that a variable names for the backend, else on the one that leads to rank 0's
    store. None: that store is on this host."""
    found = interfaces()
    if environment.get(GLOO_VARIABLE):
        one = gloo_interface(found, environment)
    elif environment.get(NCCL_VARIABLE):
        one = nccl_interface(found, environment)
    else:
        one = interface_towards(found, master_addr)
    return None if one is None else one.address


def group_by_node(places: Mapping[int, RankPlace]) -> list[tuple[int, ...]]:
    """The ranks of each node, that with the lowest local rank first. Nodes are in the order of their lowest ranks."""
    machines: dict[tuple[str, str], list[int]] = {}
    for rank, one in sorted(places.items()):
        machines.setdefault((one.host, one.machine), []).append(rank)
    nodes = [node for ranks in machines.values() for node in _split(ranks, places)]
    return sorted(nodes, key=min)


def _split(ranks: list[int], places: Mapping[int, RankPlace]) -> list[tuple[int, ...]]:
    """Ranks of one machine: as many nodes as there are ranks with its lowest local rank."""
    by_local: dict[int, list[int]] = {}
    for rank in ranks:
        by_local.setdefault(places[rank].local_rank, []).append(rank)
    lowest = min(by_local)
    nodes = {first: [first] for first in by_local.pop(lowest)}
    # torchrun numbers a node's ranks consecutively; srun may distribute them round robin.
    first_of = {rank: rank - places[rank].local_rank + lowest for rank in ranks}
    are_consecutive = set(first_of.values()) <= nodes.keys()
    firsts = list(nodes)
    for _, same in sorted(by_local.items()):
        for position, rank in enumerate(same):
            nodes[first_of[rank] if are_consecutive else firsts[position % len(firsts)]].append(rank)
    return [tuple(node) for node in nodes.values()]
