"""What gets through from this host to another's port: is it open, is it theirs, and does a large message arrive?

Many ports are tried at once, each on a thread of its own: dropped packets get no answer, so a closed port costs the
whole limit, and one after another they would cost minutes.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from drumline.doctor.pairs.listeners import ANSWER, CALL, COUNT, IDLE_S, LARGE, PING, PING_BYTES, read_exactly
from drumline.net.reasons import Reason, reason_of

Outcome = Literal["open", "refused", "silent", "unreachable", "stranger"]
OUTCOMES: dict[str, Outcome] = {Reason.REFUSED: "refused", Reason.NO_ANSWER: "silent"}
# SYN is sent again after 1 s: a port that lets the second one in is open, if on a lossy network.
CONNECT_S = 2.0
# Some full-size packets, of 9000 bytes too; and little enough to be sent to 255 hosts at once.
LARGE_BYTES = 1 << 16
# Tried when large packets vanish, to say which still pass: usual MTUs, of tunnels and jumbo frames among them.
MTUS = (8900, 1500, 1450, 1400, 1280, 1000, 576)
HEADERS_BYTES = 52  # IPv4 and TCP with time stamps
MOST_THREADS = 1024
STACK_BYTES = 256 << 10


@dataclass(frozen=True)
class Target:
    """A port of another node."""

    node: int
    address: str
    port: int
    large: bool = False
    """Whether to send a large message too."""


def probe_all(targets: Sequence[Target], token: bytes) -> list[dict[str, Any]]:
    """For each target `{"outcome": ...}`, with `received` of a large message and `passes` for packets that get by."""
    if not targets:
        return []
    _allow_open_files(len(targets) * 2 + 256)
    before = threading.stack_size(STACK_BYTES)
    try:
        with ThreadPoolExecutor(min(len(targets), MOST_THREADS)) as pool:
            return list(pool.map(lambda target: probe(target, token), targets))
    finally:
        threading.stack_size(before)


def probe(target: Target, token: bytes) -> dict[str, Any]:
    outcome = _reach(target, token)
    if outcome != "open" or not target.large:
        return {"outcome": outcome}
    received = _large(target, token, LARGE_BYTES)
    if received != 0:
        return {"outcome": outcome, "received": received}
    return {"outcome": outcome, "received": received, "passes": _largest_that_passes(target, token)}


def call(
    target: Target, token: bytes, wanted: bytes, num_bytes: int = 0, seconds: float = 0.0
) -> socket.socket:
    """A new connection to the port of that very node, ready for what is wanted."""
    line = socket.create_connection((target.address, target.port), timeout=CONNECT_S)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.settimeout(IDLE_S)
        line.sendall(CALL.pack(token, wanted, num_bytes, seconds))
        (node,) = ANSWER.unpack(read_exactly(line, ANSWER.size))
        if node != target.node:
            raise ConnectionResetError(f"node {node} answers")
    except BaseException:
        line.close()
        raise
    return line


def _reach(target: Target, token: bytes) -> Outcome:
    try:
        with socket.create_connection((target.address, target.port), timeout=CONNECT_S):
            pass
    except OSError as error:
        return OUTCOMES.get(reason_of(error), "unreachable")
    try:
        with call(target, token, PING) as line:
            line.sendall(bytes(PING_BYTES))
            read_exactly(line, PING_BYTES)
    except OSError:
        # Connected, and then no word of ours: some other program, or another host, has that address and port.
        return "stranger"
    return "open"


def _large(target: Target, token: bytes, num_bytes: int) -> int | None:
    """How many bytes of a large message arrived, as the other side counted them; None when it could not say."""
    try:
        with call(target, token, LARGE, num_bytes) as line:
            # The whole fits into the send buffer; the kernel goes on with it while we wait for the count.
            line.sendall(bytes(num_bytes))
            return int(COUNT.unpack(read_exactly(line, COUNT.size))[0])
    except OSError:
        return None


def _largest_that_passes(target: Target, token: bytes) -> int | None:
    """The largest MTU of the list whose packets arrive; None when none does."""

    def passes(mtu: int) -> bool:
        # One packet of that size: the kernel would put several of them into one large one on its way.
        return bool(_large(target, token, mtu - HEADERS_BYTES))

    with ThreadPoolExecutor(len(MTUS)) as pool:
        good = [mtu for mtu, does in zip(MTUS, pool.map(passes, MTUS), strict=True) if does]
    return max(good, default=None)


def _allow_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
