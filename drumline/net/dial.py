"""Whether a port of another host is reachable, and why not: errno in words, waiting for a port,
probing many hosts.

A probe is a TCP connection that the host answers with a random token of this start: an address may
belong to more than one machine (every docker0 has the same), so an answer alone is not enough. The
host's wall clock is sent with the token.
"""

from __future__ import annotations

import errno
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from drumline.base.text import print_message, show_progress

# A SYN is sent again after 1 s: a port that accepts the second one is open, on a lossy network.
CONNECT_S = 2.0
# A probe is made once, and a closed port ends the job: three attempts of the kernel.
PROBE_S = 5.0
REPLY_S = 10.0
# A connection between two hosts that are up and that fails for this long will not succeed later.
CLOSED_S = 20.0
MAX_PROBES = 256
FIRST_NOTICE_S = 5.0
GROWTH = 3.0
# Pauses between attempts: short at first, since after a restart the other side is soon ready.
FIRST_POLL_S = 0.02
LAST_POLL_S = 0.2
OPEN_RENDEZVOUS = "open TCP {port} on {host} to the job's hosts"
OPEN_DATA = "open TCP 1024-65535 {where} for the job's hosts (AWS: all traffic from the security group itself)"


# Why a connection failed


class Reason(StrEnum):
    """How an attempt to connect failed. The value is what people read."""

    REFUSED = "connection refused"
    NO_ANSWER = "no answer"
    NO_ROUTE = "no route to host"
    UNKNOWN_NAME = "the name does not resolve"
    WRONG_HOST = "another host or program answers"
    NO_REPLY = "accepts connections but does not reply"
    CLOSED = "closed by the other side"


_REASONS = {
    errno.ECONNREFUSED: Reason.REFUSED,
    errno.ETIMEDOUT: Reason.NO_ANSWER,
    errno.EHOSTUNREACH: Reason.NO_ROUTE,
    errno.ENETUNREACH: Reason.NO_ROUTE,
    errno.ECONNRESET: Reason.CLOSED,
    errno.EPIPE: Reason.CLOSED,
}
_EXPLAINED: dict[str, str] = {
    Reason.REFUSED: "connection refused (nothing listens there yet)",
    Reason.NO_ANSWER: "no answer (a firewall drops the packets, or the host is down)",
}
_CLOSED: dict[str, str] = {
    Reason.REFUSED: "refused, though a process listens there: a firewall rejects it",
    Reason.NO_ANSWER: "no answer: packets are dropped, as a security group or firewall does it",
    Reason.NO_ROUTE: "no route to host, or a firewall rejects it",
    Reason.WRONG_HOST: "another host or program answers there",
}


def reason_of(error: OSError) -> str:
    """A `Reason`, or the system's own text for other errors."""
    if isinstance(error, TimeoutError):
        return Reason.NO_ANSWER
    if isinstance(error, socket.gaierror):
        return Reason.UNKNOWN_NAME
    return _REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()


def explained(reason: str) -> str:
    """The reason with its likely cause, for a port where no process may listen yet."""
    return _EXPLAINED.get(reason, reason)


def explained_closed(reason: str) -> str:
    """The same for a port where a process of ours listens."""
    return _CLOSED.get(reason, reason)


# Waiting for a port


class WaitNotice:
    """When a process that waits should report it: soon, and then at intervals that grow."""

    def __init__(self, *, first_s: float = FIRST_NOTICE_S, growth: float = GROWTH) -> None:
        self.begin = time.monotonic()
        self.first_s = first_s
        self.next_s = first_s
        self.interval_s = max(1.0, first_s)
        self.growth = growth
        self.count = 0

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.begin

    def is_due(self) -> bool:
        """Whether it is time for a notice; True starts the wait for the next."""
        if self.waited_s < self.next_s:
            return False
        self.interval_s *= self.growth
        self.next_s = self.waited_s + self.interval_s
        self.count += 1
        return True

    def report(self, text: str) -> None:
        """Report what this process waits for: one updated line on a terminal, otherwise when due.
        Call it often."""
        if not sys.stderr.isatty():
            if self.is_due():
                print_message(text)
        elif self.waited_s >= self.first_s:
            show_progress(f"drumline: {text}")

    def clear(self) -> None:
        """The wait is over: on a terminal its line is removed."""
        if sys.stderr.isatty():
            show_progress("")


class Blocked(NamedTuple):
    """Why a port cannot be reached, and for how long that has been the reason."""

    reason: str
    lasted_s: float


def wait_for_port(
    host: str,
    port: int,
    *,
    timeout_s: float,
    limits: Mapping[str, float],
    waiting: str,
    check: Callable[[], None] | None = None,
) -> Blocked | None:
    """None when something listens there. `limits`: how long some reasons may last before the wait
    ends early. `waiting`: for what, in the notices; empty: there are none. `check` is called
    repeatedly; what it raises ends the wait."""
    begin = time.monotonic()
    notice = WaitNotice(first_s=min(FIRST_NOTICE_S, timeout_s / 4))
    connect_s = max(0.1, min(CONNECT_S, timeout_s))
    last_reason = ""
    reason_since = 0.0
    pause_s = FIRST_POLL_S

    while True:
        try:
            socket.create_connection((host, port), timeout=connect_s).close()
            return None
        except OSError as error:
            reason = reason_of(error)
        now = time.monotonic()
        if reason != last_reason:
            last_reason = reason
            reason_since = now
        lasted_s = now - reason_since
        if lasted_s >= limits.get(reason, timeout_s) or now - begin >= timeout_s:
            return Blocked(reason, lasted_s)
        if check is not None:
            check()
        if waiting and notice.is_due():
            waited = f"{notice.waited_s:.0f} s of {timeout_s:g} s"
            print_message(f"{waiting} {host}:{port}: {explained(reason)} ({waited})")
        time.sleep(pause_s)
        pause_s = min(LAST_POLL_S, 1.3 * pause_s)


# Probing hosts


@dataclass(frozen=True)
class ProbeTarget:
    """Where a host receives data, and the token of its answer."""

    rank: int
    host: str
    interface: str
    address: str
    port: int
    token: str


class ProbeListener:
    """Answers every connection with its token, until it is closed."""

    def __init__(self, address: str) -> None:
        self.token = secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        if ":" in address:  # IPv4 too, also where net.ipv6.bindv6only is 1
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind((address, 0))
        self._socket.listen(512)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, name="drumline-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        """The thread: until the socket is closed."""
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            with caller, suppress(OSError):
                caller.settimeout(REPLY_S)
                caller.sendall(self.token.encode())


def probe_hosts(targets: Sequence[ProbeTarget]) -> dict[int, str]:
    """Why targets could not be reached, by their ranks. Each is probed in a thread, some hundred at
    a time: a closed port takes its whole timeout."""
    if not targets:
        return {}
    with ThreadPoolExecutor(min(len(targets), MAX_PROBES)) as pool:
        results = zip(targets, pool.map(_probe, targets), strict=True)
        return {target.rank: reason for target, reason in results if reason is not None}


def _probe(target: ProbeTarget) -> str | None:
    """Why it failed; None: it is the host that was meant."""
    token = target.token.encode()
    received = b""
    try:
        connection = socket.create_connection((target.address, target.port), timeout=PROBE_S)
    except OSError as error:
        return reason_of(error)

    with connection:
        connection.settimeout(REPLY_S)
        try:
            while len(received) < len(token):
                piece = connection.recv(256)
                if not piece:
                    break
                received += piece
        except TimeoutError:
            return Reason.NO_REPLY
        except OSError:  # reset: what was received counts
            pass

    return None if received == token else Reason.WRONG_HOST
