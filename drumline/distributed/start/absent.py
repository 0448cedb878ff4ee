"""Ranks that have not come, in words: by their node, and by its name where that is known."""

from __future__ import annotations

from collections.abc import Mapping

from drumline.errors import PreflightError
from drumline.launch.topology import Topology
from drumline.text import number_ranges


def too_late(topology: Topology, hosts: Mapping[int, str], *, timeout_s: float) -> PreflightError:
    """The start timeout is over, and only these ranks are here."""
    missing = _missing(topology, hosts)
    by_host: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        by_host.setdefault(host, []).append(rank)
    here = ", ".join(f"{number_ranges(ranks)} on {host}" for host, ranks in by_host.items())
    return PreflightError(
        f"{len(missing)} of {topology.world_size} ranks did not start within {timeout_s:g} s: "
        f"missing {_named(missing, hosts, topology)}; here: {here}",
        next_step="look at the missing ranks' own output; raise --dist.start_timeout_s if they are only slow",
    )


def waiting_for_first(topology: Topology) -> str:
    """Without rank 0 nobody knows who else is here."""
    return f"rank {topology.rank} on {topology.host} waits for {_named([0], {}, topology)}"


def first_is_late(topology: Topology, *, timeout_s: float) -> PreflightError:
    return PreflightError(
        f"{_named([0], {}, topology)}, which opens the meeting, did not start within {timeout_s:g} s",
        next_step="look at rank 0's own output; raise --dist.start_timeout_s if it is only slow",
    )


def waiting_for(topology: Topology, hosts: Mapping[int, str]) -> str:
    """What a rank says while it waits; nothing when all are here. `hosts`: of the ranks that are."""
    missing = _missing(topology, hosts)
    who = f"rank {topology.rank} on {topology.host}"
    return f"{who} waits for {_named(missing, hosts, topology)}" if missing else ""


def _missing(topology: Topology, hosts: Mapping[int, str]) -> list[int]:
    return [rank for rank in range(topology.world_size) if rank not in hosts]


def _named(missing: list[int], hosts: Mapping[int, str], topology: Topology) -> str:
    """`rank 3 (node-a), ranks 4-7 (node 1)`: by node, where all have as many ranks as this one."""
    size = topology.local_world_size
    if topology.world_size % size or size == topology.world_size:
        return _ranks(missing)
    by_node: dict[int, list[int]] = {}
    for rank in missing:
        by_node.setdefault(rank // size, []).append(rank)
    return ", ".join(
        f"{_ranks(ranks)} ({_node_name(node, hosts, topology)})" for node, ranks in by_node.items()
    )


def _node_name(node: int, hosts: Mapping[int, str], topology: Topology) -> str:
    if node < len(topology.node_names):
        return topology.node_names[node]
    size = topology.local_world_size
    known = [hosts[rank] for rank in range(node * size, (node + 1) * size) if rank in hosts]
    return known[0] if known else f"node {node}"


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {number_ranges(numbers)}"
