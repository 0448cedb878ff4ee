"""How a node is reached, and whether the first one is there yet: plain sockets, no torch."""

from __future__ import annotations

import socket
import sys
import time

from drumline.errors import PreflightError
from drumline.launch.node.closed_ports import CLOSED_S, closed_rendezvous_port
from drumline.launch.node.dialling import CAUSES, NO_ROUTE, REFUSED, SILENT
from drumline.terminal import print_message, show_progress

LOOPBACK = "127.0.0.1"
FIRST_WORD_S = 5.0
# Of a port that is refused: the launcher there may still load torch.
REFUSED_S = 60.0
NO_NAME = "its name does not resolve here"
GROWTH = 3.0
# Between two tries to reach the first node: short at first, since after a restart it is there in a moment.
FIRST_POLL_S, LAST_POLL_S = 0.02, 0.2
WHY_NOT = {
    REFUSED: "refused (nobody listens there; the launcher of node 0 is not up)",
    SILENT: "no answer (a firewall drops it, or the machine is off)",
}


class Patience:
    """When somebody who waits should say so again: soon, and then at intervals that grow."""

    def __init__(self, *, first_s: float = FIRST_WORD_S, growth: float = GROWTH) -> None:
        self.begin = time.monotonic()
        self.first_s = self.next_s = first_s
        self.interval_s, self.growth = max(1.0, first_s), growth

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.begin

    def is_over(self) -> bool:
        """Whether it is time for a word; asking starts the wait for the next."""
        if self.waited_s < self.next_s:
            return False
        self.interval_s *= self.growth
        self.next_s = self.waited_s + self.interval_s
        return True

    def tell(self, words: str) -> None:
        """What is waited for, as one line that counts: in place on a terminal, else when it is time. Call it often."""
        if not sys.stderr.isatty():
            if self.is_over():
                print_message(words)
        elif self.waited_s >= self.first_s:
            show_progress(f"drumline: {words}")

    def end(self) -> None:
        """The wait is over: on a terminal its line is removed."""
        if sys.stderr.isatty():
            show_progress("")


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


def wait_for_port(
    endpoint: str,
    *,
    timeout_s: float,
    hosts: tuple[str, str] | None = None,
    closed_s: float = CLOSED_S,
    refused_s: float = REFUSED_S,
) -> None:
    """Return when the first node listens: people start nodes in any order, and torchrun would wait a minute only.

    `hosts`: this one and the first, where both are known to be up: then what stays in the way for so long is an error.
    """
    host, _, port = endpoint.rpartition(":")
    patience = Patience()
    limits = {SILENT: closed_s, NO_ROUTE: closed_s, NO_NAME: closed_s, REFUSED: refused_s}
    before, since, pause_s = "", 0.0, FIRST_POLL_S
    try:
        while cause := _obstacle(host, int(port), timeout_s=max(0.1, min(4.0, timeout_s))):
            why = WHY_NOT.get(cause, cause)
            if cause != before:
                before, since = cause, time.monotonic()
            if hosts and cause in limits and time.monotonic() - since >= limits[cause]:
                raise _closed(host, int(port), hosts, cause)
            if patience.waited_s >= timeout_s:
                raise PreflightError(
                    f"the first node did not answer at {endpoint}, where the nodes meet, within {timeout_s:g} s: {why}",
                    next_step="start the node with NODE_RANK 0 there, and open that port to this machine",
                )
            patience.tell(
                f"waiting for the first node at {endpoint}, {patience.waited_s:.0f} s so far: {why}"
            )
            time.sleep(pause_s)
            pause_s = min(LAST_POLL_S, 1.3 * pause_s)
    finally:
        patience.end()


def _closed(host: str, port: int, hosts: tuple[str, str], cause: str) -> PreflightError:
    source, target = hosts
    if cause == NO_NAME:
        return PreflightError(
            f"{source} does not know the name {host}, by which --hosts has the first host",
            next_step=f"add {host} to DNS, or to /etc/hosts on {source}; or give an address in --hosts",
        )
    return closed_rendezvous_port(port, source=source, target=target, cause=cause)


def _obstacle(host: str, port: int, *, timeout_s: float) -> str:
    """What stands between this machine and that port; empty when it can be reached."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except TimeoutError:
        return SILENT
    except socket.gaierror:
        return NO_NAME
    except OSError as error:
        return CAUSES.get(error.errno or 0) or str(error.strerror or error)
    return ""
