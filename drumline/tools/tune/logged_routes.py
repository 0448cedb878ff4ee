"""Networks of the interfaces of hosts, as the output of `ip route` and `ip address` in a log shows
them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from itertools import combinations

MAX_NETWORKS = 1_000
NETWORK = r"(?P<network>\d{1,3}(?:\.\d{1,3}){3}/\d{1,2})"
LINK_ROUTE = re.compile(NETWORK + r" dev (?P<interface>[\w.@-]{1,32})\b.{0,60}scope link")
ADDRESS = re.compile(
    r"\binet " + NETWORK + r"\b.{0,80} scope global .{0,60}?(?P<interface>[\w.-]{1,32})$"
)


@dataclass(frozen=True, kw_only=True)
class SharedNetwork:
    """Two interfaces of a host whose networks overlap."""

    host: str
    network: str
    interfaces: tuple[str, str]


class LoggedRoutes:
    def __init__(self) -> None:
        self._networks: dict[tuple[str, str], ipaddress.IPv4Network] = {}

    def read(self, text: str, name: str) -> None:
        """`name`: of the file, for lines before which no launcher wrote a host."""
        if " scope " not in text:
            return
        match = LINK_ROUTE.search(text) or ADDRESS.search(text)
        if match is None or len(self._networks) >= MAX_NETWORKS:
            return
        host = text[: match.start()].strip(" []():|") or name
        try:
            network = ipaddress.IPv4Network(match["network"], strict=False)
        except ValueError:
            return
        self._networks[host, match["interface"]] = network

    def shared_networks(self) -> list[SharedNetwork]:
        """The first of each host."""
        shared: dict[str, SharedNetwork] = {}
        for first, second in combinations(self._networks.items(), 2):
            (host, interface), network = first
            (other_host, other_interface), other_network = second
            if host == other_host and host not in shared and network.overlaps(other_network):
                shared[host] = SharedNetwork(
                    host=host, network=str(network), interfaces=(interface, other_interface)
                )
        return [*shared.values()]
