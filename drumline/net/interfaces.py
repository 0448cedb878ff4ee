"""The network interfaces and addresses of this machine, and which interface gloo and NCCL use. No
packet is sent.

Both libraries choose an interface unless a variable names one, and neither reports its choice. With
a wrong one (a container's bridge, the loopback) the process group never forms.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drumline.base.errors import PreflightError

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
NCCL_FAMILY = "NCCL_SOCKET_FAMILY"
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
# ioctl requests. /sys has the same data, but in a container it may show another network namespace.
GET_FLAGS = 0x8913
GET_ADDRESS = 0x8915
GET_MTU = 0x8921
IS_ENABLED = 0x1
IS_RUNNING = 0x40
# What NCCL uses only when there is no other interface, in this order.
NCCL_LAST = ("docker", "lo", "virbr")
LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104
DISCARD_PORT = 9


@dataclass(frozen=True)
class Interface:
    """`address` is its IPv4 address, or the address that was chosen."""

    name: str
    address: str | None
    mtu: int
    is_up: bool
    ipv6: tuple[str, ...] = ()
    """IPv6 addresses, except link-local ones."""

    @property
    def is_loopback(self) -> bool:
        return self.address is not None and ipaddress.ip_address(self.address).is_loopback


def interfaces() -> list[Interface]:
    """All interfaces, in the kernel's order."""
    ipv6 = _ipv6_addresses()
    found = []
    for _, name in socket.if_nameindex():
        address = _ask(name, GET_ADDRESS)
        mtu = _ask(name, GET_MTU)
        found.append(
            Interface(
                name,
                socket.inet_ntoa(address[20:24]) if address else None,
                int(struct.unpack("i", mtu[16:20])[0]) if mtu else 0,
                bool(_flags(name) & IS_RUNNING),  # up, and with a link: what NCCL checks
                tuple(ipv6.get(name, ())),
            )
        )
    return found


def gloo_interface(
    found: Sequence[Interface], environment: Mapping[str, str], *, own: Sequence[str] | None = None
) -> Interface | None:
    """The interface that gloo uses: the named one, otherwise the one that this host's name resolves
    to (`own`)."""
    if named := environment.get(GLOO_VARIABLE):
        wanted = named.split(",")[0]
        known = (one for one in found if one.name == wanted and (one.address or one.ipv6))
        return next(
            (one if one.address else replace(one, address=one.ipv6[0]) for one in known), None
        )
    for address in own_addresses() if own is None else own:
        if one := _holder(found, address):
            return replace(one, address=address)
    # The name does not resolve to an address of this machine: torch warns, and uses the loopback.
    return _holder(found, LOOPBACK)


def nccl_interface(found: Sequence[Interface], environment: Mapping[str, str]) -> Interface | None:
    """The first interface that NCCL uses: by its variable, otherwise any but container bridges and
    loopback."""
    family = environment.get(NCCL_FAMILY)
    usable = [
        one for one in (_of_family(one, family) for one in found if one.is_up) if one is not None
    ]
    named = environment.get(NCCL_VARIABLE, "")
    if len(named) > 1:  # NCCL does not look at a single character
        return next((one for one in usable if _matches(one.name, named)), None)
    return min(usable, key=_nccl_place, default=None)


def interface_towards(found: Sequence[Interface], host: str) -> Interface | None:
    """The interface on the route to that host; None when there is no route, or that host is this
    one."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # on a datagram socket: chooses the route, sends nothing
            source: str = probe.getsockname()[0]
    except OSError:
        return None
    one = next(
        (replace(one, address=source) for one in found if source in (one.address, *one.ipv6)), None
    )
    return None if one is None or one.is_loopback or source == target[0] else one


def outward_address(environment: Mapping[str, str], master_addr: str) -> str | None:
    """This host's address on the interface that a variable names for the backend, otherwise on the
    route to rank 0's store. None: that store is on this host."""
    found = interfaces()
    if environment.get(GLOO_VARIABLE):
        one = gloo_interface(found, environment)
    elif environment.get(NCCL_VARIABLE):
        one = nccl_interface(found, environment)
    else:
        one = interface_towards(found, master_addr)
    return None if one is None else one.address


def is_enabled(name: str) -> bool:
    """Whether it is administratively up, with or without a carrier."""
    return bool(_flags(name) & IS_ENABLED)


def own_addresses() -> list[str]:
    """What this host's name resolves to, in the resolver's order."""
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(answer[4][0]) for answer in answers]


def own_address(endpoint: str) -> str:
    """The address of this machine on the route to the first node; no packet is sent to find it."""
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise PreflightError(
            f"MASTER_ADDR {host} is unreachable from {socket.gethostname()}: {error.strerror}",
            next_step="give a name or address of the node with NODE_RANK 0 that this machine can reach",
        ) from error


def check_is_own(endpoint: str) -> None:
    """The first node runs the rendezvous, at one of its addresses: a second node with NODE_RANK 0
    must not start."""
    host = endpoint.rpartition(":")[0]
    own = own_address(endpoint)
    if not _is_own(host):
        raise PreflightError(
            f"this is node 0, which runs the rendezvous, but {host} is not an address of {socket.gethostname()}, "
            f"which has {own}",
            next_step=f"if {host} is another machine, give this one a NODE_RANK of its own; if it is this one, "
            "give the address that its own network knows (on a cloud: the private one)",
        )


def own_binding(host: str) -> str:
    """The address of this machine that others reach by that name; 0.0.0.0 if that is not known. On
    Debian a host's own name resolves to 127.0.1.1: then it is the only other address that the
    machine has."""
    try:
        found = [
            str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        ]
    except OSError:
        found = []
    found.sort(key=lambda address: ":" in address)  # other hosts use IPv4, if they have it
    own = [address for address in found if _is_own(address)]
    is_meant = host == "localhost" or host in found
    outer = own if is_meant else [one for one in own if not ipaddress.ip_address(one).is_loopback]
    if own and not outer:
        outer = [
            one.address for one in interfaces() if one.address and not one.is_loopback and one.is_up
        ]
        return outer[0] if len(outer) == 1 else EVERYWHERE
    return outer[0] if outer else EVERYWHERE


def _is_own(address: str) -> bool:
    """Whether an address or a name is this machine's."""
    with socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _holder(found: Sequence[Interface], address: str) -> Interface | None:
    if one := next((one for one in found if address == one.address or address in one.ipv6), None):
        return one
    # On Debian a host's name resolves to 127.0.1.1, which no interface has; the loopback answers
    # there.
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return next((one for one in found if one.is_loopback), None) if is_loopback else None


def _of_family(one: Interface, family: str | None) -> Interface | None:
    """The interface with the address that NCCL would use; it never uses the IPv6 loopback."""
    ipv6 = [address for address in one.ipv6 if address != "::1"]
    if one.address and family != "AF_INET6":
        return one
    return replace(one, address=ipv6[0]) if ipv6 and family != "AF_INET" else None


def _nccl_place(one: Interface) -> int:
    """The sort key: InfiniBand first, then the rest in the kernel's order, then container bridges
    and the loopback."""
    last = next(
        (place for place, prefix in enumerate(NCCL_LAST, start=2) if one.name.startswith(prefix)), 1
    )
    return 0 if one.name.startswith("ib") else last


def _matches(name: str, wanted: str) -> bool:
    """`eth,ib` are prefixes, `=eth0` is a whole name, `^docker` excludes; a port after a name is
    ignored."""
    excludes = wanted.startswith("^")
    text = wanted.removeprefix("^")
    is_exact = text.startswith("=")
    words = [word.partition(":")[0] for word in text.removeprefix("=").split(",") if word]
    hit = any(name == word if is_exact else name.startswith(word) for word in words)
    return hit != excludes


def _flags(name: str) -> int:
    answer = _ask(name, GET_FLAGS)
    return 0 if answer is None else int(struct.unpack("H", answer[16:18])[0])


def _ask(name: str, request: int) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None


def _ipv6_addresses() -> dict[str, list[str]]:
    """By interface, without link-local addresses (fe80), which other hosts cannot use."""
    found: dict[str, list[str]] = {}
    try:
        lines = IPV6_ADDRESSES.read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for digits, _, _, scope, _, name in (line.split() for line in lines):
        if scope != "20":
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found
