"""Where a node's sidecar can be reached by the others: on one address, not on every network of the host."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence

from drumline.errors import PreflightError
from drumline.launch.rank_environment import WITHOUT_WATCH
from drumline.net.interfaces import (
    GLOO_VARIABLE,
    LOOPBACK,
    NCCL_VARIABLE,
    gloo_interface,
    interface_towards,
    interfaces,
    nccl_interface,
)

BACKLOG = 128


def way_out(environment: Mapping[str, str], meeting_point: str) -> str | None:
    """This host's address on the network that data was told to take, else on the one that leads to the meeting point.
    None: that is on this host itself."""
    found = interfaces()
    if environment.get(GLOO_VARIABLE):
        one = gloo_interface(found, environment)
    elif environment.get(NCCL_VARIABLE):
        one = nccl_interface(found, environment)
    else:
        one = interface_towards(found, meeting_point)
    return None if one is None else one.address


def own_address(node: int, addresses: Sequence[str | None]) -> str:
    """Where this node can be reached. On the meeting point's own host that is the way to any other; when no other host
    has one either, all are on one machine."""
    if (own := addresses[node]) is not None:
        return own
    found = interfaces()
    others = (address for address in addresses if address and not ipaddress.ip_address(address).is_loopback)
    ways = (interface_towards(found, address) for address in others)
    return next((one.address for one in ways if one is not None and one.address), LOOPBACK)


def listen(address: str, port: int = 0) -> socket.socket:
    """`port`: where a launcher has told the others to dial; else any that is free."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PreflightError(
            f"the watch cannot listen at {address}{f' port {port}' if port else ''}: {error.strerror}",
            next_step="check that the network of this address is up; or train without the watchdog: "
            f"{WITHOUT_WATCH}",
        ) from error
    return listener
