"""Both sides of the tests between hosts: one opens ports (`Listeners`), the others connect. So each
finds out which ports are open, whether a large message arrives, and how fast the link is.

Many are tried at once, each in its own thread: dropped packets get no answer, so a closed port
takes the whole limit.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from drumline.net.dial import CONNECT_S, Reason, reason_of
from drumline.tools.doctor.finding import JsonObject
from drumline.tools.doctor.pairs.survey import OPEN

TOKEN_BYTES = 16
# The request: the token, the action, and a number of bytes and seconds. The reply: the number of
# the node.
CALL = struct.Struct("!16scQd")
REPLY = struct.Struct("!I")
PING = b"P"
SEND = b"S"
PING_BYTES = 16
COUNT_AND_SECONDS = struct.Struct("!Qd")
# A large message without progress for this long is lost, not slow: TCP retransmits after 0.2 s, 0.4
# s, ...
STALLED_S = 1.2
# A caller may not block a thread of ours: a test between two hosts takes fractions of a second.
IDLE_S = 3.0
MAX_CALLS = 2048
BUFFER_BYTES = 1 << 20
# A few full-size packets, even of 9000 bytes; and small enough to be sent to 255 hosts at once.
LARGE_BYTES = 1 << 16
# Tried when large packets are lost, to find a size that passes: usual MTUs, also of tunnels and
# jumbo frames.
MTUS = (8900, 1500, 1450, 1400, 1280, 1000, 576)
HEADERS_BYTES = 52  # IPv4, and TCP with time stamps
MAX_THREADS = 1024
PINGS = 20
PINGS_LIMIT_S = 0.3
# One thread cannot send over 100 Gbit/s: this is enough for that speed, and ends the transfer if it
# is faster.
MAX_SPEED_BYTES = 2 << 30
CHUNK_BYTES = 1 << 20
MAX_NODES = 4096
NodeNumber = Annotated[int, Meta(ge=0, le=MAX_NODES)]
Port = Annotated[int, Meta(ge=1, le=65535)]


@dataclass(frozen=True)
class Target:
    """A port of another node that is tried."""

    node: NodeNumber
    address: str
    port: Port
    large: bool = False
    """Whether to send a large message too."""


# The open ports of this host


class Listeners:
    """The open ports of this node, each bound to one address, never to all.

    A caller must know the token of this check, which is sent only over the control channel; other
    callers are disconnected without a reply. The reply names the node, since a name or an address
    may belong to another host. A caller can only get an echo, and the count of its bytes.
    """

    def __init__(self, token: bytes, node: int) -> None:
        self.token = token
        self.node = node
        self._sockets: list[socket.socket] = []
        self._calls = threading.Semaphore(MAX_CALLS)

    def open(self, address: str, port: int = 0) -> int:
        """Listen there; 0 is any free high port. Returns the port."""
        listener = socket.create_server((address, port), backlog=1024)
        self._sockets.append(listener)
        accepting = threading.Thread(target=self._accept, args=[listener], daemon=True)
        accepting.start()

        return int(listener.getsockname()[1])

    def close(self) -> None:
        """End all listeners, and with them their threads."""
        for listener in self._sockets:
            # Only closing it would leave the thread in accept, and so the port open.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)

            listener.close()

        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        """A thread for each call, until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                call, _ = listener.accept()
                if self._calls.acquire(blocking=False):
                    serving = threading.Thread(target=self._serve, args=[call], daemon=True)
                    serving.start()
                else:
                    call.close()

    def _serve(self, call: socket.socket) -> None:
        """Answer one call: an echo, or the count of its bytes."""
        try:
            with call, contextlib.suppress(OSError):
                call.settimeout(IDLE_S)
                call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                token, action, num_bytes, seconds = CALL.unpack(read_exactly(call, CALL.size))
                if token != self.token:
                    return

                call.sendall(REPLY.pack(self.node))

                while action == PING:
                    call.sendall(read_exactly(call, PING_BYTES))

                if action == SEND:
                    _receive(call, num_bytes, min(seconds, IDLE_S))
        finally:
            self._calls.release()


def read_exactly(call: socket.socket, num_bytes: int) -> bytes:
    """OSError when the other side closes, or sends nothing for too long."""
    received = b""
    while len(received) < num_bytes:
        new = call.recv(num_bytes - len(received))
        if not new:
            raise ConnectionResetError("closed by the other side")

        received += new

    return received


def _receive(call: socket.socket, num_bytes: int, seconds: float) -> None:
    """Read for a while, or until it stalls; then send how many bytes arrived (none when large packets
    are lost) and how long it took, from the first bytes on."""
    buffer = bytearray(BUFFER_BYTES)
    taken = 0
    elapsed = 0.0
    call.settimeout(STALLED_S)

    with contextlib.suppress(TimeoutError):
        taken = len(call.recv(1))
        begin = time.monotonic()
        while taken < num_bytes and elapsed < seconds and (new := call.recv_into(buffer)):
            taken += new
            elapsed = time.monotonic() - begin

    call.settimeout(IDLE_S)
    call.sendall(COUNT_AND_SECONDS.pack(taken, elapsed))

    # Closing with unread bytes would reset the connection, and the answer could be lost.
    while call.recv_into(buffer):
        pass


# Ports


def probe_all(targets: Sequence[Target], token: bytes) -> list[JsonObject]:
    """For each its `outcome`; of a large message how much was `received`, and the MTU that `passes`
    if nothing was: `{'outcome': 'open', 'received': 0, 'passes': 1400}`."""
    if not targets:
        return []

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (needed := len(targets) * 2 + 256):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))

    with ThreadPoolExecutor(min(len(targets), MAX_THREADS)) as pool:
        return list(pool.map(lambda target: probe(target, token), targets))


def probe(target: Target, token: bytes) -> JsonObject:
    """One target: the port, and if it is asked for, a large message."""
    outcome = _connect(target, token)
    if outcome != OPEN or not target.large:
        return {"outcome": outcome}

    received = _send_large(target, token, LARGE_BYTES)
    if received != 0:
        return {"outcome": outcome, "received": received}

    def passing(mtu: int) -> int | None:
        # One packet of that size: the kernel may merge several into a larger one.
        """Whether a packet of this size arrives."""
        return mtu if _send_large(target, token, mtu - HEADERS_BYTES) else None

    with ThreadPoolExecutor(len(MTUS)) as pool:
        sizes = filter(None, pool.map(passing, MTUS))
        return {
            "outcome": outcome,
            "received": received,
            "passes": max(sizes, default=None),
        }


def _connect(target: Target, token: bytes) -> str:
    """`OPEN`, or why not."""
    try:
        socket.create_connection((target.address, target.port), timeout=CONNECT_S).close()
    except OSError as error:
        reason = reason_of(error)
        return reason if reason in (Reason.REFUSED, Reason.NO_ANSWER) else Reason.NO_ROUTE

    try:
        with _call(target, token, PING) as line:
            line.sendall(bytes(PING_BYTES))
            read_exactly(line, PING_BYTES)
    except OSError:
        # Connected, but without our reply: another program or host has that address and port.
        return Reason.WRONG_HOST

    return OPEN


@contextlib.contextmanager
def _call(
    target: Target,
    token: bytes,
    action: bytes,
    size: int = 0,
    seconds: float = 0.0,
) -> Iterator[socket.socket]:
    """A new connection to the port of that node, ready for the action."""
    with socket.create_connection((target.address, target.port), timeout=CONNECT_S) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(IDLE_S)
        line.sendall(CALL.pack(token, action, size, seconds))
        (node,) = REPLY.unpack(read_exactly(line, REPLY.size))

        if node != target.node:
            raise ConnectionResetError(f"node {node} answers")

        yield line


def _send_large(target: Target, token: bytes, num_bytes: int) -> int | None:
    """How many bytes arrived, as the other side counted them; None when it could not reply."""
    try:
        with _call(target, token, SEND, num_bytes, IDLE_S) as line:
            # The message fits into the send buffer; the kernel sends it while we wait for the
            # count.
            line.sendall(bytes(num_bytes))
            count, _ = COUNT_AND_SECONDS.unpack(read_exactly(line, COUNT_AND_SECONDS.size))
            return int(count)
    except OSError:
        return None


# Speed


def measure(target: Target, token: bytes, seconds: float) -> JsonObject:
    """`latency_s` (half of the median round trip) and `bytes_per_s`, or an `error`:
    `{'latency_s': 5.2e-05, 'bytes_per_s': 1175000000.0}`."""
    times: list[float] = []
    try:
        with _call(target, token, PING) as line:
            begin = time.monotonic()
            while len(times) < PINGS and time.monotonic() - begin < PINGS_LIMIT_S:
                sent = time.monotonic()
                line.sendall(bytes(PING_BYTES))
                read_exactly(line, PING_BYTES)
                times.append(time.monotonic() - sent)

        with _call(target, token, SEND, MAX_SPEED_BYTES, seconds) as line:
            # Until the other side replies that it has enough: our own send buffer accepts megabytes
            # at once.
            _send_until_answered(line, deadline=time.monotonic() + seconds + IDLE_S)
            line.settimeout(IDLE_S)
            taken, elapsed = COUNT_AND_SECONDS.unpack(read_exactly(line, COUNT_AND_SECONDS.size))
            # Drop what is still in the send buffer: on a slow line it would take half a minute, and
            # delay the next transfer.
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError as error:
        return {"error": str(error) or type(error).__name__}

    return {
        "latency_s": statistics.median(times) / 2,
        "bytes_per_s": taken / elapsed if elapsed > 0 else 0.0,
    }


def _send_until_answered(line: socket.socket, deadline: float) -> None:
    """Send as fast as the link takes it, until the other side replies. TimeoutError at the deadline."""
    chunk = memoryview(bytes(CHUNK_BYTES))
    line.setblocking(False)
    poll = select.poll()
    poll.register(line, select.POLLIN | select.POLLOUT)

    while (left := deadline - time.monotonic()) > 0:
        for _, events in poll.poll(left * 1000):
            if events & ~select.POLLOUT:
                return

            line.send(chunk)

    raise TimeoutError("the transfer did not end")
