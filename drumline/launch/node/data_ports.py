"""Checks whether nodes reach each other on arbitrary ports, between their rendezvous and the start
of their ranks.

The ports of ranks are not known in advance. If a firewall allows only the rendezvous port, a
script's ranks would wait for each other until torch times out. The check takes milliseconds when
all ports are open.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from drumline.base.terminal import print_message
from drumline.net.dial import (
    CLOSED_S,
    ProbeListener,
    ProbeTarget,
    Reason,
    closed_data_ports,
    probe_hosts,
)

RETRY_S = 0.5
# A late or unexpected reply does not show that the port is closed.
CLOSED = (Reason.NO_ANSWER, Reason.REFUSED, Reason.NO_ROUTE)

NodeCard = Mapping[str, Any]


@contextlib.contextmanager
def open_probe_port(address: str) -> Iterator[dict[str, Any]]:
    """Listen where the ranks' store will be. Yields what the others need to connect; empty if that
    fails."""
    listener = None
    with contextlib.suppress(OSError):
        listener = ProbeListener(address)
    try:
        yield (
            {} if listener is None else {"probe_port": listener.port, "probe_token": listener.token}
        )
    finally:
        if listener is not None:
            listener.close()


def unreachable_nodes(
    cards: Mapping[int, NodeCard], this_node: int, *, limit_s: float = CLOSED_S
) -> dict[int, str]:
    """Why this node cannot reach others, by their ranks. A closed port is retried for some time."""
    begun = time.monotonic()
    is_reported = False
    peers = [card for rank, card in cards.items() if rank != this_node]
    targets = [target for peer in peers if (target := _target(peer)) is not None]
    while True:
        failed = {rank: why for rank, why in probe_hosts(targets).failed.items() if why in CLOSED}
        if not failed or time.monotonic() - begun >= limit_s:
            return failed
        targets = [target for target in targets if target.rank in failed]
        if not is_reported:
            is_reported = True
            hosts = ", ".join(target.host for target in targets)
            print_message(
                f"data ports of {hosts} are closed to {cards[this_node]['host']}; trying for {limit_s:g} s"
            )
        time.sleep(RETRY_S)


def check_data_ports(
    cards: Mapping[int, NodeCard], unreachable: Mapping[int, Mapping[str, str]]
) -> None:
    """Raise if a node cannot reach the first, which has the ranks' store; otherwise warn.
    `unreachable`: by node."""
    for target, card in cards.items():
        reasons = {
            source: failed[str(target)]
            for source, failed in unreachable.items()
            if str(target) in failed
        }
        if not reasons:
            continue
        sources = [str(cards[source]["host"]) for source in reasons]
        reason = next(iter(reasons.values()))
        error = closed_data_ports(
            sources, card["host"], port=card.get("probe_port", 0), reason=reason
        )
        if target == min(cards):
            raise error
        print_message(
            f"warning: {error.what}; ranks that send data there will block. Try: {error.next_step}"
        )


def _target(card: NodeCard) -> ProbeTarget | None:
    """None if the node does not listen, or its name does not resolve: both are reported
    elsewhere."""
    with contextlib.suppress(OSError, KeyError, TypeError, ValueError, OverflowError):
        addresses = socket.getaddrinfo(card["address"], card["probe_port"], type=socket.SOCK_STREAM)
        address = str(addresses[0][4][0])
        return ProbeTarget(
            card["rank"], card["host"], "", address, card["probe_port"], card["probe_token"]
        )
    return None
