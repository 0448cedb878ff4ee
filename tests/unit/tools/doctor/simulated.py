"""Hosts that exist in memory alone: the coordinator asks them like real ones, and they answer from
a table.

With them planning, checks and reports are tested for hundreds of hosts, with faults in chosen
places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from drumline.net.dial import Reason
from drumline.tools.doctor.machine.machine_facts import HostSettings
from drumline.tools.doctor.pairs import examination
from drumline.tools.doctor.pairs.examination import Coordinator, NodeLostError
from drumline.tools.doctor.pairs.survey import HostRecord, Survey

FAST = 1.2e9
SLOW = 1.0e8
Way = tuple[int, int]


@dataclass(frozen=True)
class Cluster:
    """What is wrong, and where; ways are pairs of hosts' numbers."""

    count: int
    down: Collection[int] = ()
    closed: Collection[Way] = ()
    unnamed: Collection[Way] = ()
    holes: Collection[Way] = ()
    slow: Collection[int] = ()
    late: Collection[int] = ()
    """Clocks that are ahead."""
    requests: list[tuple[int, str]] = field(default_factory=list)
    """Every request, as it came."""


class SimulatedClient:
    """Replaces a NodeClient."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number

    @property
    def clock_ahead_s(self) -> float:
        return 7.0 if self.number in self.cluster.late else 0.0

    async def open(self) -> None:
        if self.number in self.cluster.down:
            raise NodeLostError("it is unreachable")

    async def ask(self, action: str, limit_s: float, /, **arguments: Any) -> Any:
        self.cluster.requests.append((self.number, action))
        await asyncio.sleep(0)
        act: Callable[[dict[str, Any]], Any] = getattr(self, f"_{action}")
        return act(arguments)

    async def close(self, **_: Any) -> None:
        pass

    def _begin(self, _: dict[str, Any]) -> dict[str, Any]:
        eth0 = {"name": "eth0", "address": address(self.number), "mtu": 1500, "is_up": True}
        lo = {"name": "lo", "address": "127.0.0.1", "mtu": 65536, "is_up": True}
        networks = {"interfaces": [lo, eth0], "gloo": eth0, "nccl": eth0}
        return {
            "host": name(self.number),
            **networks,
            "variables": {},
            "reached_at": address(self.number),
        }

    def _facts(self, _: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _names(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {"error": "Name or service not known"}
            if (self.number, number_of(name)) in self.cluster.unnamed
            else {"addresses": [address(number_of(name))]}
            for name in arguments["names"]
        }

    def _listen(self, arguments: dict[str, Any]) -> dict[str, Any]:
        opened: dict[str, Any] = {"data": [40000, 40001], "other_ports": {}}
        if arguments["rendezvous_port"] is not None:
            opened["rendezvous_port"] = arguments["rendezvous_port"]
        return opened

    def _probe(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._tried(target) for target in arguments["targets"]]

    def _tried(self, target: dict[str, Any]) -> dict[str, Any]:
        way = (self.number, target["node"])
        if way in self.cluster.closed and target["port"] >= 40000:
            return {"outcome": Reason.NO_ANSWER}
        has_hole = way in self.cluster.holes
        large = {"received": 0 if has_hole else 65536, "passes": 1400 if has_hole else None}
        return {"outcome": "open", **(large if target.get("large") else {})}

    def _measure(self, arguments: dict[str, Any]) -> dict[str, Any]:
        ends = (self.number, arguments["target"]["node"])
        speed = (
            SLOW
            if any(end in self.cluster.slow for end in ends)
            else FAST + (ends[0] * 7 + ends[1]) % 13 * 1e6
        )
        return {"latency_s": 5e-5, "bytes_per_s": speed}


def name(number: int) -> str:
    return f"n{number:03d}"


def number_of(called: str) -> int:
    return int(called[1:])


def address(number: int) -> str:
    return f"10.9.{number // 250}.{number % 250 + 1}"


def examine(cluster: Cluster) -> Survey:
    """The whole examination of them."""
    survey = Survey(
        [HostRecord(name(number), name(number)) for number in range(cluster.count)], 29500
    )
    clients: list[Any] = [SimulatedClient(cluster, number) for number in range(cluster.count)]
    asyncio.run(examination.examine(Coordinator(survey, clients, HostSettings({}), lambda _: None)))
    return survey
