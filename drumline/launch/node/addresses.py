"""How a node is reached, and whether the first one is there yet: plain sockets, no torch."""

from __future__ import annotations

import socket
import sys
import time

from drumline.errors import PreflightError

LOOPBACK = "127.0.0.1"
FIRST_WORD_S = 5.0
EVERY_S = 15.0


class Patience:
    """When somebody who waits should say so again: soon, and then now and then."""

    def __init__(self, *, first_s: float = FIRST_WORD_S, every_s: float = EVERY_S) -> None:
        self.begin = time.monotonic()
        self.next_s = first_s
        self.every_s = every_s

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.begin

    def is_over(self) -> bool:
        """Whether it is time for a word; asking starts the wait for the next."""
        if self.waited_s < self.next_s:
            return False
        self.next_s += self.every_s
        return True


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


def check_is_own(endpoint: str) -> None:
    """The first node keeps the meeting place, so that must be an address of its own: of two machines with NODE_RANK 0
    one would wait for itself in vain."""
    host = endpoint.rpartition(":")[0]
    own = own_address(endpoint)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise PreflightError(
                f"this is node 0, where the nodes meet, but {host} is not an address of {socket.gethostname()}, "
                f"which has {own}",
                next_step=f"if {host} is another machine, give this one a NODE_RANK of its own; if it is this one, "
                "give the address that its own network knows (on a cloud: the private one)",
            ) from error


def wait_for_port(endpoint: str, *, timeout_s: float) -> None:
    """Return when the first node listens: people start nodes in any order, and torchrun would wait a minute only."""
    host, _, port = endpoint.rpartition(":")
    patience = Patience()
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(0.1, min(4.0, timeout_s))).close()
            return
        except OSError as error:
            why = _why_not(error)
            if patience.waited_s >= timeout_s:
                raise PreflightError(
                    f"the first node did not answer at {endpoint}, where the nodes meet, within {timeout_s:g} s: {why}",
                    next_step="start the node with NODE_RANK 0 there, and open that port to this machine",
                ) from error
        if patience.is_over():
            say(f"waiting for the first node at {endpoint}, {patience.waited_s:.0f} s so far: {why}")
        time.sleep(0.2)


def say(words: str) -> None:
    """A line on the launcher's screen, in one piece: several threads may speak."""
    print(f"drumline: {words}\n", end="", file=sys.stderr, flush=True)


def _why_not(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused (nobody listens there; the launcher of node 0 is not up)"
    if isinstance(error, TimeoutError):
        return "no answer (a firewall drops it, or the machine is off)"
    return str(error.strerror or error)
