"""By hand, a node's side: goes to node 0, says who it is, and does what it is asked.

People, srun and pods start nodes in any order, so it tries for a while. When it cannot get there it says why itself:
nobody else would know.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from drumline.doctor.pairs.node import Node, Subject
from drumline.errors import PreflightError, UsageError
from drumline.net.frames import FrameError, FrameReader, Message, write_all
from drumline.net.handshake import WRONG_SECRET, RefusedError, dial
from drumline.net.secrets import VARIABLE

CONNECT_S = 2.0
AGAIN_S = 0.3
HANDSHAKE_S = 5.0
PURPOSE = "doctor"


@dataclass(frozen=True)
class Place:
    """Which node of how many, and where they meet."""

    node: int
    nodes: int
    master: str
    port: int
    secret: str | None
    wait_s: float


def join(place: Place, subject: Subject) -> Message:
    """Take part until node 0 ends the examination; what it said then."""
    with _connect(place) as line:
        line.settimeout(None)
        source = _shake_hands(line, place)
        node = Node(source, line.fileno(), subject, here=str(line.getsockname()[0]))
        last = node.serve()
    if last is None:
        raise PreflightError(
            f"node 0 at {place.master}:{place.port} went away before the end",
            next_step="look at what it says, and start all nodes again",
        )
    return last


def _connect(place: Place) -> socket.socket:
    deadline = time.monotonic() + place.wait_s
    while True:
        try:
            return socket.create_connection((place.master, place.port), timeout=CONNECT_S)
        except OSError as error:
            if time.monotonic() + AGAIN_S > deadline:
                raise _not_reached(place, error) from error
        time.sleep(AGAIN_S)


def _not_reached(place: Place, error: OSError) -> PreflightError:
    where, here = f"{place.master}:{place.port}", socket.gethostname()
    start = f"start `drumline doctor --node-rank 0` on {place.master}"
    if isinstance(error, socket.gaierror):
        return PreflightError(
            f"the name {place.master} does not resolve on {here}: {error.strerror}",
            next_step="add it to /etc/hosts or DNS, or give --master by address",
        )
    if isinstance(error, TimeoutError):
        return PreflightError(
            f"silence from {where} for {place.wait_s:g} s, seen from {here}: packets are dropped, or the host is down",
            next_step=f"open TCP {place.port} on {place.master} to this host, and {start}",
        )
    if isinstance(error, ConnectionRefusedError):
        return PreflightError(
            f"{where} refuses connections from {here}: the host is there, and nothing listens at that port",
            next_step=f"{start} (it waits; a longer --wait gives more time to start it)",
        )
    return PreflightError(
        f"{where} cannot be reached from {here}: {error.strerror or error}",
        next_step="check the address, and that a route leads there",
    )


def _shake_hands(line: socket.socket, place: Place) -> FrameReader:
    """The reader of what node 0 says after it: some of that may have been read already."""
    source = FrameReader(line.fileno())
    secret = None if place.secret is None else place.secret.encode()
    handshake = dial(secret, PURPOSE, place.node, 0, nodes=place.nodes)
    message = next(handshake)
    try:
        while True:
            write_all(line.fileno(), source.session.encode(message or {}))
            message = handshake.send(source.next(HANDSHAKE_S) or {})
    except StopIteration as done:
        source.use(done.value.session)
        return source
    except RefusedError as error:
        raise PreflightError(
            f"node 0 refuses node {place.node}: {error.what}", next_step=error.next_step
        ) from error
    except (FrameError, OSError) as error:
        where = f"{place.master}:{place.port}"
        if isinstance(error, FrameError) and error.kind == WRONG_SECRET:
            raise PreflightError(
                f"who answers at {where} does not know {VARIABLE}",
                next_step="give the same value on all nodes, and check --master",
            ) from error
        raise PreflightError(
            f"what listens at {where} is not drumline's doctor",
            next_step="end it, or give another port with --master ADDRESS:PORT",
        ) from error


def check_place(node: int, nodes: int) -> None:
    """Of --nodes and --node-rank."""
    if not 0 <= node < nodes:
        raise UsageError(
            f"--node-rank is {node} of --nodes {nodes}",
            next_step=f"give each node a number from 0 to {nodes - 1}",
        )
