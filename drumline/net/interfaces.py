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
    return [_interface(name, ipv6.get(name, [])) for _, name in socket.if_nameindex()]


def _interface(name: str, ipv6: Sequence[str]) -> Interface:
    """As the kernel describes it."""
    address = _ask(name, GET_ADDRESS)
    mtu = _ask(name, GET_MTU)
    return Interface(
        name,
        socket.inet_ntoa(address[20:24]) if address else None,
        int(struct.unpack("i", mtu[16:20])[0]) if mtu else 0,
        bool(_flags(name) & IS_RUNNING),  # up, and with a link: what NCCL checks
        tuple(ipv6),
    )


def gloo_interface(
    candidates: Sequence[Interface], environment: Mapping[str, str]
) -> Interface | None:
    """The interface that gloo uses: the named one, otherwise the one that this host's name resolves
    to."""
    if names := environment.get(GLOO_VARIABLE):
        return _named_interface(candidates, names.split(",")[0])
    for address in _resolve(socket.gethostname()):
        if interface := _holder(candidates, address):
            return replace(interface, address=address)
    # The name does not resolve to an address of this machine: torch warns, and uses the loopback.
    return _holder(candidates, LOOPBACK)


def _named_interface(candidates: Sequence[Interface], name: str) -> Interface | None:
    """The one that a variable names, if it has an address."""
    for interface in candidates:
        if interface.name == name and interface.address:
            return interface
        if interface.name == name and interface.ipv6:
            return replace(interface, address=interface.ipv6[0])
    return None


def nccl_interface(
    candidates: Sequence[Interface], environment: Mapping[str, str]
) -> Interface | None:
    """The first interface that NCCL uses: by its variable, otherwise any but container bridges and
    loopback."""
    family = environment.get(NCCL_FAMILY)
    running = [interface for interface in candidates if interface.is_up]
    usable = list(filter(None, (_of_family(interface, family) for interface in running)))
    names = environment.get(NCCL_VARIABLE, "")
    if len(names) > 1:  # NCCL does not look at a single character
        return next((interface for interface in usable if _matches(interface.name, names)), None)
    return min(usable, key=_nccl_order, default=None)


def interface_towards(candidates: Sequence[Interface], host: str) -> Interface | None:
    """The interface on the route to that host; None when there is no route, or that host is this
    one."""
    try:
        answers = socket.getaddrinfo(host, DISCARD_PORT, type=socket.SOCK_DGRAM)
        target = str(answers[0][4][0])
        source = _source_address(answers[0][0], target)
    except OSError:
        return None

    if source == target:
        return None

    for interface in candidates:
        if source in (interface.address, *interface.ipv6):
            outgoing = replace(interface, address=source)
            return None if outgoing.is_loopback else outgoing

    return None


def _source_address(family: socket.AddressFamily, host: str) -> str:
    """This machine's address on the route to that host."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # On a datagram socket it chooses the route, and sends nothing.
        probe.connect((host, DISCARD_PORT))
        return str(probe.getsockname()[0])


def outward_address(environment: Mapping[str, str], master_addr: str) -> str | None:
    """This host's address on the interface that a variable names for the backend, otherwise on the
    route to rank 0's store. None: that store is on this host."""
    if environment.get(GLOO_VARIABLE):
        interface = gloo_interface(interfaces(), environment)
    elif environment.get(NCCL_VARIABLE):
        interface = nccl_interface(interfaces(), environment)
    else:
        interface = interface_towards(interfaces(), master_addr)
    return None if interface is None else interface.address


def is_enabled(name: str) -> bool:
    """Whether it is administratively up, with or without a carrier."""
    return bool(_flags(name) & IS_ENABLED)


def _resolve(host: str) -> list[str]:
    """In the resolver's order; empty if it does not resolve."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(answer[4][0]) for answer in answers]


def own_address(host: str) -> str:
    """The address of this machine on the route to the first node; no packet is sent to find it."""
    try:
        return _source_address(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except OSError as error:
        raise PreflightError(
            f"MASTER_ADDR {host} is unreachable from {socket.gethostname()}: {error.strerror}",
            next_step="give a name or address of the node with NODE_RANK 0 that this machine can reach",
        ) from error


def check_is_own(host: str) -> None:
    """The first node runs the rendezvous, at one of its addresses: a second node with NODE_RANK 0
    must not start."""
    address = own_address(host)
    if not is_own(host):
        raise PreflightError(
            f"this is node 0, which runs the rendezvous, but {host} is not an address of {socket.gethostname()}, "
            f"which has {address}",
            next_step=f"if {host} is another machine, give this one a NODE_RANK of its own; if it is this one, "
            "give the address that its own network knows (on a cloud: the private one)",
        )


def own_binding(host: str) -> str:
    """The address of this machine that others reach by that name; 0.0.0.0 if that is not known. On
    Debian a host's own name resolves to 127.0.1.1: then it is the only other address that the
    machine has."""
    resolved = _resolve(host)
    # other hosts use IPv4, if they have it
    resolved.sort(key=lambda address: ":" in address)
    local = [address for address in resolved if is_own(address)]
    if not local:
        return EVERYWHERE
    if host == "localhost" or host in resolved:  # the loopback, if it is that, is meant
        return local[0]

    for address in local:
        if not ipaddress.ip_address(address).is_loopback:
            return address

    outer = [
        interface.address
        for interface in interfaces()
        if interface.address and not interface.is_loopback and interface.is_up
    ]
    return outer[0] if len(outer) == 1 else EVERYWHERE


def is_own(address: str) -> bool:
    """Whether an address or a name is this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _holder(candidates: Sequence[Interface], address: str) -> Interface | None:
    """The interface that has this address."""
    for interface in candidates:
        if address == interface.address or address in interface.ipv6:
            return interface
    # On Debian a host's name resolves to 127.0.1.1, which no interface has; the loopback answers
    # there.
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    return next((interface for interface in candidates if interface.is_loopback), None)


def _of_family(interface: Interface, family: str | None) -> Interface | None:
    """The interface with the address that NCCL would use; it never uses the IPv6 loopback."""
    if interface.address and family != "AF_INET6":
        return interface
    ipv6 = [address for address in interface.ipv6 if address != "::1"]
    return replace(interface, address=ipv6[0]) if ipv6 and family != "AF_INET" else None


def _nccl_order(interface: Interface) -> int:
    """The sort key: InfiniBand first, then the rest in the kernel's order, then container bridges
    and the loopback."""
    if interface.name.startswith("ib"):
        return 0
    for position, prefix in enumerate(NCCL_LAST, start=2):
        if interface.name.startswith(prefix):
            return position
    return 1


def _matches(name: str, selection: str) -> bool:
    """`eth,ib` are prefixes, `=eth0` is a whole name, `^docker` excludes; a port after a name is
    ignored."""
    excludes = selection.startswith("^")
    selection = selection.removeprefix("^")
    is_exact = selection.startswith("=")
    entries = filter(None, selection.removeprefix("=").split(","))
    names = [entry.partition(":")[0] for entry in entries]
    is_named = name in names if is_exact else name.startswith(tuple(names))
    return is_named != excludes


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
    addresses: dict[str, list[str]] = {}
    try:
        lines = IPV6_ADDRESSES.read_text(encoding="utf-8").splitlines()
    except OSError:
        return addresses
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if scope != "20":
            addresses.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return addresses
