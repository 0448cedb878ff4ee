"""Why a port cannot be used: errno in words, and the errors about ports that are closed between two hosts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from enum import StrEnum

from drumline.errors import PreflightError


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
# Where nobody may listen yet, and where somebody certainly does.
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
# A connection between two hosts that are up and that fails for so long will not succeed by itself.
CLOSED_S = 20.0
OPEN_RENDEZVOUS = "open TCP {port} on {host} to the job's hosts"
OPEN_DATA = "open TCP 1024-65535 {where} for the job's hosts (AWS: all traffic from the security group itself)"


def reason_of(error: OSError) -> str:
    """A `Reason`, or what the system calls an error that has none."""
    if isinstance(error, TimeoutError):
        return Reason.NO_ANSWER
    if isinstance(error, socket.gaierror):
        return Reason.UNKNOWN_NAME
    return _REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()


def explained(reason: str) -> str:
    """With what may be behind it, of a port where nobody is known to listen."""
    return _EXPLAINED.get(reason, reason)


def explained_closed(reason: str) -> str:
    """The same of a port where a process of ours listens."""
    return _CLOSED.get(reason, reason)


def closed_rendezvous_port(port: int, *, source: str, target: str, reason: str) -> PreflightError:
    """`source`, `target`: hosts, as the user calls them."""
    return PreflightError(
        f"the rendezvous port {port} is closed from {source} to {target} ({explained_closed(reason)})",
        next_step=OPEN_RENDEZVOUS.format(port=port, host=target),
    )


def closed_data_ports(sources: Sequence[str], target: str, *, port: int, reason: str) -> PreflightError:
    """Only the rendezvous port is open."""
    return PreflightError(
        f"data ports are closed from {', '.join(sources)} to {target}: port {port} ({explained_closed(reason)})",
        next_step=OPEN_DATA.format(where=f"on {target}"),
    )
