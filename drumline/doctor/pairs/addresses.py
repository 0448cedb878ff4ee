"""By which address of a host the others reach it, and which ports they shall try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from drumline.doctor.pairs.survey import Survey

# A host of containers may have dozens of bridges; those that gloo and NCCL would take come first.
MOST_OTHERS = 4
DATA_PORTS = 2


def choose_addresses(survey: Survey) -> None:
    """Where its name leads, when the host has that address; else where the coordinator reached it; else its first. By
    hand nobody uses names: there the address counts from which it came to node 0."""
    votes: dict[int, Counter[str]] = {number: Counter() for number in survey.here()}
    for (_, target), edge in survey.edges.items():
        if target in votes:
            votes[target].update((edge.addresses or [])[:1])
    for number, counted in votes.items():
        host = survey.hosts[number]
        if not survey.names_matter and host.interface_of(host.address) is not None:
            continue
        own = outside_addresses(host.interfaces)
        preferred = [address for address, _ in counted.most_common()]
        chosen = host.nccl["address"] if host.nccl else None
        host.address = next((one for one in (*preferred, host.address, chosen, *own) if one in own), None)


def outside_addresses(interfaces: list[dict[str, Any]]) -> list[str]:
    """Those that others might reach; on a machine that has none, the loopback, which is all there is."""
    up = [one for one in interfaces if one["address"] and one["is_up"]]
    outside = [str(one["address"]) for one in up if not str(one["address"]).startswith("127.")]
    return outside or [str(one["address"]) for one in up]


def other_addresses(survey: Survey, number: int) -> list[str]:
    """Where a listener shall stand beside the main address: a library may choose it, or be the one that works."""
    host = survey.hosts[number]
    chosen = [one["address"] for one in (host.gloo, host.nccl) if one]
    ranked = sorted(outside_addresses(host.interfaces), key=lambda address: address not in chosen)
    return [address for address in ranked if address != host.address][:MOST_OTHERS]


def targets_of(
    survey: Survey, source: int, ports: dict[int, dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What one host shall try: for each port its kind (`data`, `meeting`, or an address) and the request."""
    for target, opened in ports.items():
        if target == source:
            continue
        host = survey.hosts[target]
        for place, port in enumerate(opened["data"]):
            yield "data", {"node": target, "address": host.address, "port": port, "large": place == 0}
        for address, port in opened["others"].items():
            yield address, {"node": target, "address": address, "port": port}
        if "meeting_port" in opened:
            # Where the name leads from there, as a rank would go.
            named = survey.edge(source, target).addresses or [host.address or ""]
            yield "meeting", {"node": target, "address": named[0], "port": opened["meeting_port"]}
