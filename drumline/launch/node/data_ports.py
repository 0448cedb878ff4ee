"""Checks whether nodes reach each other on arbitrary ports, between their rendezvous and the start
of their ranks.

The ports of ranks are not known in advance. If a firewall allows only the rendezvous port, a
script's ranks would wait for each other until torch times out. The check takes milliseconds when
all ports are open.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from drumline.base.terminal import print_message
from drumline.net.dial import CLOSED_S, ProbeListener, ProbeTarget, Reason, probe_hosts
from drumline.rank.rendezvous.reachability import ClosedPath, closed_lines, refuse_closed_paths

RETRY_S = 0.5
# A late or unexpected reply does not show that the port is closed.
CLOSED = (Reason.NO_ANSWER, Reason.REFUSED, Reason.NO_ROUTE)

NodeCard = Mapping[str, Any]


@contextlib.contextmanager
def open_probe_port(address: str) -> Iterator[dict[str, Any]]:
    """Listen where the ranks' store will be. Yields what the others need to connect; without a port
    if that fails."""
    listener = None
    with contextlib.suppress(OSError):
        listener = ProbeListener(address)
    if listener is None:
        yield {"probe_port": 0, "probe_token": ""}
        return
    try:
        yield {"probe_port": listener.port, "probe_token": listener.token}
    finally:
        listener.close()


def unreachable_nodes(
    cards: Mapping[int, NodeCard],
    this_node: int,
    *,
    limit_s: float = CLOSED_S,
    is_decided: Callable[[], bool] = lambda: False,
) -> dict[int, str]:
    """Why this node cannot reach others, by their ranks. A closed port is retried for some time,
    unless the round is decided: then the others have closed theirs."""
    begun = time.monotonic()
    is_reported = False
    peers = [card for rank, card in cards.items() if rank != this_node]
    targets = [_target(card) for card in peers if 0 < card["probe_port"] < 1 << 16]
    while True:
        failed = {rank: why for rank, why in probe_hosts(targets).failed.items() if why in CLOSED}
        if not failed or time.monotonic() - begun >= limit_s or is_decided():
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
    targets = {rank: _target(card) for rank, card in cards.items()}
    paths = [
        ClosedPath(targets[source], targets[rank], reasons[str(rank)])
        for source, reasons in unreachable.items()
        for rank in targets
        if str(rank) in reasons
    ]
    first = min(cards)
    refuse_closed_paths([path for path in paths if path.target.rank == first], backend="")
    for line in closed_lines(paths):
        print_message(f"warning: {line}; ranks that send data there will block")


def _target(card: NodeCard) -> ProbeTarget:
    return ProbeTarget(
        card["rank"], card["host"], "", card["address"], card["probe_port"], card["probe_token"]
    )
