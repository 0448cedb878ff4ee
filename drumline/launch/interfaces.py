"""The networks of this machine, and which of them gloo and NCCL would take: read from the kernel, nothing is sent.

Both libraries choose by themselves unless told, and neither says what it chose. A choice that leads nowhere (a
container's bridge, the loopback) shows as a group that never comes together.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
NETWORKS = Path("/sys/class/net")
GET_ADDRESS = 0x8915
# What NCCL takes only when there is nothing else, in this order.
NCCL_LAST = ("docker", "lo")


@dataclass(frozen=True)
class Interface:
    """One network of this machine, by its IPv4 address."""

    name: str
    address: str | None
    mtu: int
    is_up: bool

    @property
    def is_loopback(self) -> bool:
        return self.address is not None and self.address.startswith("127.")


def interfaces() -> list[Interface]:
    """All of them, in the kernel's order."""
    return [
        Interface(name, _address(name), int(_read(name, "mtu") or 0), _read(name, "operstate") != "down")
        for _, name in socket.if_nameindex()
    ]


def gloo_interface(found: Sequence[Interface], environment: Mapping[str, str]) -> Interface | None:
    """The one gloo would take: the named one, else the one with the address that this host's name resolves to."""
    if named := environment.get(GLOO_VARIABLE):
        wanted = named.split(",")[0]
        return next((one for one in found if one.name == wanted and one.address), None)
    try:
        address = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except OSError:
        address = "127.0.0.1"  # gloo falls back to it, with a warning
    loopback = next((one for one in found if one.is_loopback), None)
    # Debian gives a host the name 127.0.1.1, which no interface has and the loopback serves.
    return next((one for one in found if one.address == address), loopback)


def nccl_interface(found: Sequence[Interface], environment: Mapping[str, str]) -> Interface | None:
    """The first one NCCL would take: by the prefixes it is told, else any but bridges of containers and loopback."""
    usable = [one for one in found if one.is_up and one.address]
    if named := environment.get(NCCL_VARIABLE):
        return next((one for one in usable if _matches(one.name, named)), None)
    ordered = sorted(usable, key=_nccl_place)
    return ordered[0] if ordered else None


def _nccl_place(one: Interface) -> int:
    """InfiniBand first, then the rest in the kernel's order, then what it takes only when it must."""
    last = next((place for place, prefix in enumerate(NCCL_LAST, start=2) if one.name.startswith(prefix)), 1)
    return 0 if one.name.startswith("ib") else last


def _matches(name: str, wanted: str) -> bool:
    """`eth,ib` are prefixes, `=eth0` is a whole name, `^docker` is all but that."""
    excludes = wanted.startswith("^")
    text = wanted.removeprefix("^")
    is_exact = text.startswith("=")
    words = [word for word in text.removeprefix("=").split(",") if word]
    hit = any(name == word if is_exact else name.startswith(word) for word in words)
    return hit != excludes


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _read(name: str, fact: str) -> str:
    try:
        return (NETWORKS / name / fact).read_text().strip()
    except OSError:
        return ""
