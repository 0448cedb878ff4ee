"""What PyTorch's store leaves open about its sockets: who may reach it, and when silence counts as an end."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from drumline.net.interfaces import EVERYWHERE, LOOPBACK

OPEN_FILES = Path("/proc/self/fd")
TCP_RTO_MAX_MS = 44
RESEND_MS = 1000
CONNECT_S = 4.0
BACKLOG = 4096


def listen_for_store(address: str, port: int = 0) -> tuple[int, int]:
    """A socket (its number, which the store takes over) at that address alone, and its port. Left to itself, the store
    listens on every network of the machine."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)  # at once: until then another process can bind there too
        port = listener.getsockname()[1]
        return listener.detach(), port


def connect_address(bound: str) -> str:
    """How this machine itself reaches what listens there."""
    return LOOPBACK if bound == EVERYWHERE else bound


def reached_address(host: str, port: int) -> str:
    """The address of that name which answers: of several, torch's store tries the IPv6 ones alone until its timeout."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as line:
            return str(line.getpeername()[0])
    except OSError:
        return host


def notice_silence(port: int, *, after_s: int) -> None:
    """This process's connections to that port break when the other end says nothing for so long. An operation of the
    store waits for its answer without end, and a host that loses its power sends no farewell."""
    if not OPEN_FILES.is_dir():
        return
    for number in [int(entry.name) for entry in OPEN_FILES.iterdir() if _is_socket(entry)]:
        # What was listed may be closed by now, or be no connection. The copy shares its settings with the original.
        with (
            contextlib.suppress(OSError),
            socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as connection,
        ):
            peer = connection.getpeername()
            if isinstance(peer, tuple) and peer[1] == port:
                _break_after(connection, after_s)


def _is_socket(entry: Path) -> bool:
    """Python would keep its copy of anything else open for ever."""
    with contextlib.suppress(OSError):
        return str(entry.readlink()).startswith("socket:")
    return False


def _break_after(connection: socket.socket, after_s: int) -> None:
    # The first is for a question that nobody takes, the others for one that was taken and never answered.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, after_s * 1000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, after_s // 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, after_s // 6))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    # After a cut TCP waits twice as long each time before it sends again; Linux 6.15 and later let us ask for less.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, RESEND_MS)
