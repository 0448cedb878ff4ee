"""What was learned about hosts and the ways between them: filled by the coordinator, read by judge, matrix and report.

A host is known by its place in the list, so that an examination of 256 hosts is a table of 256 by 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from drumline.doctor.pairs.probe import Outcome


@dataclass(slots=True)
class Edge:
    """What was seen from one host about the way to another. None is what was not looked at."""

    addresses: list[str] | None = None
    """What the other's name leads to here; empty when it leads nowhere."""
    name_error: str | None = None
    data: Outcome | None = None
    """The high ports: the worst of them."""
    meeting: Outcome | None = None
    """The port where nodes meet, when the other host has it."""
    others: dict[str, Outcome] | None = None
    """The other's addresses beside the one that is used."""
    received: int | None = None
    """How many bytes of a large message arrived."""
    passes: int | None = None
    """The largest MTU whose packets arrive, when large ones do not."""
    latency_s: float | None = None
    bytes_per_s: float | None = None
    error: str | None = None
    """Why it could not be measured, though it was open."""

    @property
    def has_hole(self) -> bool:
        """Small messages pass, and of a large one nothing came."""
        return self.data == "open" and self.received == 0

    def as_json(self) -> dict[str, Any]:
        known = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in known if value is not None}


@dataclass
class HostSeen:
    """One host of the examination."""

    name: str
    """What the user calls it, and sentences do."""
    called: str
    """What other hosts call it: a name or an address."""
    absent: str | None = None
    """Why it takes no part (any more)."""
    absent_fix: str = ""
    hostname: str = ""
    address: str | None = None
    """The address that others use."""
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    gloo: dict[str, Any] | None = None
    nccl: dict[str, Any] | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """Those that name an interface."""
    clock_s: float | None = None
    """How far its clock is ahead of the coordinator's."""
    meeting_error: str | None = None
    """Why it could not listen where nodes meet."""
    facts: dict[str, Any] | None = None
    troubles: list[str] = field(default_factory=list)
    """What it was asked for and could not do."""

    @property
    def is_here(self) -> bool:
        return self.absent is None

    def interface_of(self, address: str | None) -> str | None:
        return next((str(one["name"]) for one in self.interfaces if one["address"] == address), None)


@dataclass
class Survey:
    """All of it."""

    hosts: list[HostSeen]
    meeting_port: int
    names_matter: bool = True
    """Whether hosts are called by their names; by hand, by addresses that are found."""
    meeting_is_tried: bool = True
    """By hand the nodes come through that port, which shows that it is open."""
    edges: dict[tuple[int, int], Edge] = field(default_factory=dict)
    elapsed_s: float = 0.0

    def edge(self, source: int, target: int) -> Edge:
        """Of these two; a new one is made for who writes."""
        known = self.edges.get((source, target))
        if known is None:
            known = self.edges[source, target] = Edge()
        return known

    def here(self) -> list[int]:
        return [number for number, host in enumerate(self.hosts) if host.is_here]

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Every way between hosts that are here."""
        here = self.here()
        return ((source, target) for source in here for target in here if source != target)

    def as_json(self) -> dict[str, Any]:
        """What is None was not looked at, and is left out of the edges: there are many."""
        names = [host.name for host in self.hosts]
        return {
            "hosts": [asdict(host) for host in self.hosts],
            "meeting_port": self.meeting_port,
            "edges": [
                {"from": names[source], "to": names[target], **edge.as_json()}
                for (source, target), edge in self.edges.items()
            ],
            "elapsed_s": self.elapsed_s,
        }
