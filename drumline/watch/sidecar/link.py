"""What is wrong with the network interface that this node talks through: read from the kernel, nothing is sent."""

from __future__ import annotations

import ipaddress
import socket

from drumline.net.interfaces import interfaces, is_enabled


def link_problem(address: str) -> str:
    """Of the interface that has this address: `eth0 is down`; empty when nothing is wrong, or nothing can be told."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        return ""
    if not _is_own(address, family):
        return f"no interface has the address {address} any more"
    holder = next((one for one in interfaces() if address in (one.address, *one.ipv6)), None)
    if holder is None or holder.is_up:
        return ""
    return f"{holder.name} has no carrier" if is_enabled(holder.name) else f"{holder.name} is down"


def _is_own(address: str, family: int) -> bool:
    """Whether the kernel lets somebody listen there; second addresses of an interface count as well."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
