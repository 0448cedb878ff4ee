"""What is known about the hosts and the links between them: filled by `examination.py`, read by
checks and reports.

A host is identified by its position in the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from drumline.tools.doctor.finding import JsonObject

Pair = tuple[int, int]
# The outcome of a port that was reached; any other outcome is a `Reason` (net/dial.py).
OPEN = "open"


@dataclass(slots=True)
class Edge:
    """The results of one host's tests with another; None: not tried."""

    addresses: list[str] | None = None
    """What the other's name resolves to; empty when it does not resolve."""
    name_error: str | None = None
    data: str | None = None
    """The worst outcome of the high ports."""
    rendezvous: str | None = None
    """The outcome of the rendezvous port, when the other host has it."""
    others: dict[str, str] | None = None
    """Outcomes of the other's further addresses."""
    received: int | None = None
    """How many bytes of a large message arrived."""
    passes: int | None = None
    """The largest MTU whose packets arrive, when large messages do not."""
    latency_s: float | None = None
    bytes_per_s: float | None = None
    error: str | None = None
    """Why an open port could not be measured."""

    @property
    def has_hole(self) -> bool:
        """Whether small messages arrive, but nothing of a large one does."""
        return self.data == OPEN and self.received == 0

    def as_json(self) -> JsonObject:
        """For programs: what was not tried is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class HostRecord:
    """What is known of one host."""

    name: str
    """The user's name for it."""
    called: str
    """The name or address by which other hosts look it up."""
    absent: str | None = None
    """Why it does not take part, or no longer does."""
    absent_fix: str = ""
    hostname: str = ""
    address: str | None = None
    """The address that others use."""
    interfaces: list[JsonObject] = field(default_factory=list)
    gloo: JsonObject | None = None
    nccl: JsonObject | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """Those that name an interface."""
    clock_s: float | None = None
    """How far its clock is ahead of ours."""
    rendezvous_error: str | None = None
    """Why it could not listen on the rendezvous port."""
    facts: JsonObject | None = None
    errors: list[str] = field(default_factory=list)
    """Requests that failed there."""

    def reachable_addresses(self) -> list[str]:
        """The addresses that others might reach; the loopback if there is no other."""
        addresses = [
            str(interface["address"])
            for interface in self.interfaces
            if interface["address"] and interface["is_up"]
        ]
        outer = [address for address in addresses if not address.startswith("127.")]
        return outer or addresses

    def interface_of(self, address: str | None) -> str | None:
        """The name of the one with this address."""
        names = {interface["address"]: str(interface["name"]) for interface in self.interfaces}
        return names.get(address)


@dataclass
class Survey:
    """All hosts of a check, and the links between them."""

    hosts: list[HostRecord]
    rendezvous_port: int
    by_ssh: bool = True
    """False: nodes connected to node 0 themselves, so its port is open, and addresses are used, not
    names."""
    edges: dict[Pair, Edge] = field(default_factory=dict)

    def edge(self, source: int, target: int) -> Edge:
        """The results of a pair, which are empty at first."""
        return self.edges.setdefault((source, target), Edge())

    @property
    def facts(self) -> dict[str, JsonObject]:
        """Those of the hosts that have answered, by name."""
        return {host.name: host.facts for host in self.hosts if host.facts is not None}

    def present(self) -> list[int]:
        """The numbers of the hosts that answer."""
        return [number for number, host in enumerate(self.hosts) if host.absent is None]

    def links(self, is_selected: Callable[[Edge], object]) -> dict[Pair, Edge]:
        """Those that were tested, and whose edge is so."""
        return {pair: edge for pair, edge in self.edges.items() if is_selected(edge)}

    def pairs(self) -> Iterator[Pair]:
        """Every link between hosts that are present."""
        present = self.present()
        return ((source, target) for source in present for target in present if source != target)

    def usual_speed(self) -> float:
        """The bytes per second of a good link: the upper quartile, or 0.

        Not the median: with three hosts, one slow host affects four of six links."""
        speeds = sorted(edge.bytes_per_s for edge in self.edges.values() if edge.bytes_per_s)
        if not speeds:
            return 0.0

        return speeds[math.ceil(0.75 * (len(speeds) - 1))]

    def as_json(self) -> JsonObject:
        """For programs: links have the names of their hosts."""
        edges = []
        for (source, target), edge in self.edges.items():
            ends = {"from": self.hosts[source].name, "to": self.hosts[target].name}
            edges.append({**ends, **edge.as_json()})

        return {
            "hosts": [asdict(host) for host in self.hosts],
            "rendezvous_port": self.rendezvous_port,
            "edges": edges,
        }
