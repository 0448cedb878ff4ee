"""Ports that are closed between two hosts that are both up: in the words of `drumline doctor`, with the rule to add."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from drumline.errors import PreflightError

SILENT, REFUSED, NO_ROUTE, STRANGER, MUTE = "silent", "refused", "no route", "stranger", "mute"
CAUSES = {
    errno.ECONNREFUSED: REFUSED,
    errno.ETIMEDOUT: SILENT,
    errno.EHOSTUNREACH: NO_ROUTE,
    errno.ENETUNREACH: NO_ROUTE,
}
# A way between hosts that are up and that stays closed for so long will not open by itself.
CLOSED_S = 20.0
DROPPED = "no answer: packets are dropped, as a security group or firewall does it"
UNREACHABLE = "no route, or a firewall that says so"
ANOTHER = "another program or host answers there"
OPEN_RENDEZVOUS = "open TCP {port} on {host} to the job's hosts"
OPEN_DATA = (
    "open TCP 1024-65535 {where} for the job's hosts (AWS: all traffic from the security group itself)"
)
CLOSED_CAUSES = {
    SILENT: DROPPED,
    REFUSED: "refused, though a process listens there: a firewall rejects it",
    NO_ROUTE: UNREACHABLE,
    STRANGER: ANOTHER,
}


def closed_rendezvous_port(port: int, *, source: str, target: str, cause: str) -> PreflightError:
    """`source`, `target`: hosts, as the user calls them."""
    return PreflightError(
        f"the rendezvous port {port} is closed from {source} to {target} ({CLOSED_CAUSES.get(cause, cause)})",
        next_step=OPEN_RENDEZVOUS.format(port=port, host=target),
    )


def closed_data_ports(sources: Sequence[str], target: str, *, port: int, cause: str) -> PreflightError:
    """Only the rendezvous port is open."""
    return PreflightError(
        f"data ports are closed from {', '.join(sources)} to {target}: port {port} ({CLOSED_CAUSES.get(cause, cause)})",
        next_step=OPEN_DATA.format(where=f"on {target}"),
    )
