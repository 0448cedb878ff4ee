"""torch's TCPStore on one address instead of all networks, with connections that are closed when
the peer is dead."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from drumline.base.text import print_message
from drumline.net.dial import CONNECT_S
from drumline.net.interfaces import EVERYWHERE, LOOPBACK, own_binding

OPEN_FILES = Path("/proc/self/fd")
TCP_RTO_MAX_MS = 44
RESEND_MS = 1000
BACKLOG = 4096


def open_tcp_store(
    host: str,
    port: int,
    *,
    timeout_s: float,
    bound: str | None = None,
) -> dist.TCPStore:
    """Connect to the store there. `bound`: run it here instead, at that address only; then a port
    of 0 is any that is free."""
    if bound is None:
        return dist.TCPStore(
            _reached_address(host, port),
            port,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )

    listener, port = listen_for_store(bound, port)
    # This host may not be able to resolve the name that the others use for it.
    return dist.TCPStore(
        local_address(bound),
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def listen_for_store(address: str, port: int = 0) -> tuple[int, int]:
    """A socket at that address only (its descriptor, which the store then owns), and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    # It listens at once: until then another process can bind to it too.
    with socket.create_server((address, port), family=family, backlog=BACKLOG) as listener:
        port = listener.getsockname()[1]
        return listener.detach(), port


def store_binding(host: str, *, name: str) -> str:
    """The address of this machine at which a store listens that others reach by `host`. `name`:
    what the user set."""
    if (bound := own_binding(host)) == EVERYWHERE != host:
        print_message(
            f"warning: {name} {host} does not show which address of {socket.gethostname()} the others reach: the store "
            f"listens on all networks. Try: set {name} to an address of this host"
        )
    return bound


def local_address(bound: str) -> str:
    """The address at which this machine itself connects to that store."""
    return LOOPBACK if bound == EVERYWHERE else bound


def _reached_address(host: str, port: int) -> str:
    """The address of that name that answers: torch's store would try only the IPv6 addresses until
    its timeout."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            return str(connection.getpeername()[0])
    except OSError:
        return host


def break_dead_connections(port: int | None, *, after_s: int, address: str | None = None) -> None:
    """Close this process's connections to that port, or address, when the peer sends nothing for so
    long. Otherwise an operation of the store would wait forever: a host that loses its power does
    not close its connections."""

    def limit(connection: socket.socket, peer: str, peer_port: int) -> None:
        if (port is None or peer_port == port) and (address is None or peer == address):
            _break_after(connection, after_s)

    _for_each_connection(limit)


def close_connections(addresses: Collection[str], *, but: Collection[int]) -> None:
    """Shut down this process's connections with these addresses, except those that have one of
    these ports."""

    def close(connection: socket.socket, peer: str, peer_port: int) -> None:
        ports = {peer_port, connection.getsockname()[1]}
        if peer in addresses and ports.isdisjoint(but):
            connection.shutdown(socket.SHUT_RDWR)

    _for_each_connection(close)


def _for_each_connection(call: Callable[[socket.socket, str, int], None]) -> None:
    """Call this with each connection of this process, its peer's address and port; an OSError of it
    is ignored, as of a connection that is closed meanwhile."""
    for entry in OPEN_FILES.iterdir() if OPEN_FILES.is_dir() else ():
        with contextlib.suppress(OSError):
            # Python would never close its copy of anything but a socket.
            if not str(entry.readlink()).startswith("socket:"):
                continue

            # The copy shares the original's options.
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                peer = connection.getpeername()
                if isinstance(peer, tuple):
                    call(connection, str(peer[0]), int(peer[1]))


def _break_after(connection: socket.socket, after_s: int) -> None:
    """Let the kernel close a connection whose peer is silent for so long."""
    # The first is for a request that is not acknowledged, the others for one that is acknowledged
    # but never answered.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, after_s * 1000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, after_s // 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, after_s // 6))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

    # After a cut TCP doubles the wait before each retransmission; Linux 6.15 and later can limit
    # it.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, RESEND_MS)
