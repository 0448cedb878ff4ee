"""What this host sees of the others: what their names resolve to, whether their ports are open, whether a large message
arrives, and how fast they are reached.

Many are tried at once, each on its own thread: dropped packets get no answer, so a closed port costs the whole limit.
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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from drumline.doctor.background import in_background, resolve_ipv4
from drumline.doctor.pairs.listeners import (
    CALL,
    COUNT,
    COUNT_AND_SECONDS,
    IDLE_S,
    LARGE,
    PING,
    PING_BYTES,
    REPLY,
    SPEED,
    read_exactly,
)
from drumline.doctor.pairs.survey import OPEN
from drumline.net.dial import CONNECT_S, Reason, reason_of

# The resolver's own limit is 5 s a try and more; nobody who starts a job waits that long for a name.
RESOLVE_S = 3.0
# Some full-size packets, also of 9000 bytes; and little enough to be sent to 255 hosts at once.
LARGE_BYTES = 1 << 16
# Tried when large packets vanish, to find those that pass: usual MTUs, also of tunnels and jumbo frames.
MTUS = (8900, 1500, 1450, 1400, 1280, 1000, 576)
HEADERS_BYTES = 52  # IPv4, and TCP with time stamps
MAX_THREADS = 1024
STACK_BYTES = 256 << 10
PINGS = 20
PINGS_LIMIT_S = 0.3
# One thread cannot send over 100 Gbit/s; enough for that in the time it has, and an end for those who are faster.
MAX_SPEED_BYTES = 2 << 30
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Target:
    """A port of another node."""

    node: int
    address: str
    port: int
    large: bool = False
    """Whether to send a large message too."""


# Names


def resolve_all(names: Iterable[str], *, limit_s: float = RESOLVE_S) -> dict[str, dict[str, Any]]:
    """For each name its `addresses` or an `error`."""
    # The resolver cannot be interrupted; threads that hang in it are left behind.
    resolving = {name: in_background(lambda name=name: _resolve(name)) for name in set(names)}  # type: ignore[misc]
    deadline = time.monotonic() + limit_s
    found = {}
    for name, answer in resolving.items():
        try:
            found[name] = answer.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            found[name] = {"error": f"the resolver did not answer within {limit_s:g} s"}
    return found


def _resolve(name: str) -> dict[str, Any]:
    try:
        return {"addresses": resolve_ipv4(name)}
    except (OSError, UnicodeError) as error:
        return {"error": str(getattr(error, "strerror", None) or error)}


# Ports


def probe_all(targets: Sequence[Target], token: bytes) -> list[dict[str, Any]]:
    """For each its `outcome`; of a large message how much was `received`, and the MTU that `passes` if nothing was."""
    if not targets:
        return []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (wanted := len(targets) * 2 + 256):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    before = threading.stack_size(STACK_BYTES)
    try:
        with ThreadPoolExecutor(min(len(targets), MAX_THREADS)) as pool:
            return list(pool.map(lambda target: probe(target, token), targets))
    finally:
        threading.stack_size(before)


def probe(target: Target, token: bytes) -> dict[str, Any]:
    outcome = _connect(target, token)
    if outcome != OPEN or not target.large:
        return {"outcome": outcome}
    received = _send_large(target, token, LARGE_BYTES)
    passes = {"passes": _largest_that_passes(target, token)} if received == 0 else {}
    return {"outcome": outcome, "received": received, **passes}


def _connect(target: Target, token: bytes) -> str:
    """`OPEN`, or why not."""
    try:
        with socket.create_connection((target.address, target.port), timeout=CONNECT_S):
            pass
    except OSError as error:
        reason = reason_of(error)
        return reason if reason in (Reason.REFUSED, Reason.NO_ANSWER) else Reason.NO_ROUTE
    try:
        with _call(target, token, PING) as line:
            line.sendall(bytes(PING_BYTES))
            read_exactly(line, PING_BYTES)
    except OSError:
        # Connected, and then no reply of ours: some other program, or another host, has that address and port.
        return Reason.WRONG_HOST
    return OPEN


def _call(target: Target, token: bytes, action: bytes, size: int = 0, seconds: float = 0.0) -> socket.socket:
    """A new connection to the port of that very node, ready for the action."""
    line = socket.create_connection((target.address, target.port), timeout=CONNECT_S)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(IDLE_S)
        line.sendall(CALL.pack(token, action, size, seconds))
        (node,) = REPLY.unpack(read_exactly(line, REPLY.size))
        if node != target.node:
            raise ConnectionResetError(f"node {node} answers")
    except BaseException:
        line.close()
        raise
    return line


def _send_large(target: Target, token: bytes, num_bytes: int) -> int | None:
    """How many bytes arrived, as the other side counted them; None when it could not reply."""
    try:
        with _call(target, token, LARGE, num_bytes) as line:
            # The whole fits into the send buffer; the kernel sends it while we wait for the count.
            line.sendall(bytes(num_bytes))
            return int(COUNT.unpack(read_exactly(line, COUNT.size))[0])
    except OSError:
        return None


def _largest_that_passes(target: Target, token: bytes) -> int | None:
    def passes(mtu: int) -> bool:
        # One packet of that size: the kernel would merge several into a large one on its way.
        return bool(_send_large(target, token, mtu - HEADERS_BYTES))

    with ThreadPoolExecutor(len(MTUS)) as pool:
        good = [mtu for mtu, does in zip(MTUS, pool.map(passes, MTUS), strict=True) if does]
    return max(good, default=None)


# Speed


def measure(target: Target, token: bytes, seconds: float) -> dict[str, Any]:
    """`latency_s` (half of the median round trip) and `bytes_per_s`, or an `error`."""
    try:
        latency_s = _latency(target, token)
        return {"latency_s": latency_s, "bytes_per_s": _bandwidth(target, token, seconds)}
    except OSError as error:
        return {"error": str(error) or type(error).__name__}


def _latency(target: Target, token: bytes) -> float:
    times: list[float] = []
    with _call(target, token, PING) as line:
        begin = time.monotonic()
        while len(times) < PINGS and time.monotonic() - begin < PINGS_LIMIT_S:
            sent = time.monotonic()
            line.sendall(bytes(PING_BYTES))
            read_exactly(line, PING_BYTES)
            times.append(time.monotonic() - sent)
    return statistics.median(times) / 2


def _bandwidth(target: Target, token: bytes, seconds: float) -> float:
    with _call(target, token, SPEED, MAX_SPEED_BYTES, seconds) as line:
        # Until the other side replies that it has enough: our own send buffer takes megabytes at once.
        _send_until_answered(line, deadline=time.monotonic() + seconds + IDLE_S)
        line.settimeout(IDLE_S)
        taken, elapsed = COUNT_AND_SECONDS.unpack(read_exactly(line, COUNT_AND_SECONDS.size))
        # What is still in the send buffer is dropped: on a slow line it would take half a minute, and delay the next
        # transfer.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return float(taken / elapsed) if elapsed > 0 else 0.0


def _send_until_answered(line: socket.socket, deadline: float) -> None:
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
