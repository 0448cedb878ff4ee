"""How a node is reached, and whether the first one is there yet: plain sockets, no torch."""

from __future__ import annotations

import socket
import time

from drumline.errors import PreflightError

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_S = 600


def own_address(endpoint: str) -> str:
    """The address of this machine that leads to the meeting place; nothing is sent to find it."""
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise PreflightError(
            f"MASTER_ADDR is {host!r}, to which no way leads from {socket.gethostname()}: {error.strerror}",
            next_step="give the name or address of the node with NODE_RANK 0, as this machine knows it",
        ) from error


def wait_for_port(endpoint: str, *, timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Return when the first node listens: people start nodes in any order, and torchrun would wait a minute only."""
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(0.1, min(5.0, timeout_s))).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise PreflightError(
                    f"nobody answers at {endpoint}, where the nodes meet: {error.strerror or error}",
                    next_step="start the node with NODE_RANK 0 there, and open that port to this machine",
                ) from error
        time.sleep(0.2)
