"""Between the rendezvous of nodes and the start of their ranks: can each node reach the others on ports of any number?

Ranks take ports that nobody knows before. Where a firewall lets only the rendezvous port through, a script's ranks
would wait for each other until torch gives up, and say nothing. The check takes milliseconds when all is well.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drumline.net.dial import ProbeListener, ProbeTarget, probe_hosts
from drumline.net.reasons import CLOSED_S, Reason, closed_data_ports
from drumline.terminal import print_message

RETRY_S = 0.5
# An answer that is late or strange does not show that the port is closed.
CLOSED = (Reason.NO_ANSWER, Reason.REFUSED, Reason.NO_ROUTE)

Claim = Mapping[str, Any]
"""What a node says of itself when nodes meet."""


@contextlib.contextmanager
def open_door(address: str) -> Iterator[dict[str, Any]]:
    """Where the store of the ranks will be. Yields what the others must know of it."""
    door = None
    with contextlib.suppress(OSError):
        door = ProbeListener(address)
    try:
        yield {} if door is None else {"probe_port": door.port, "probe_token": door.token}
    finally:
        if door is not None:
            door.close()


def closed_edges(claims: Sequence[Claim], mine: int, *, patience_s: float = CLOSED_S) -> dict[int, str]:
    """What keeps this node from others, by their numbers. A way that is closed is tried again for some time."""
    begun, is_told = time.monotonic(), False
    doors = [door for number, claim in enumerate(claims) if number != mine and (door := _door(number, claim))]
    while True:
        failed = {number: why for number, why in probe_hosts(doors).failed.items() if why in CLOSED}
        if not failed or time.monotonic() - begun >= patience_s:
            return failed
        if not is_told:
            is_told = True
            hosts = ", ".join(door.host for door in doors if door.rank in failed)
            print_message(
                f"data ports of {hosts} are closed to {claims[mine]['host']}; trying for {patience_s:g} s"
            )
        doors = [door for door in doors if door.rank in failed]
        time.sleep(RETRY_S)


def check_edges(claims: Sequence[Claim], edges: Sequence[Mapping[str, str]]) -> None:
    """Raise when a node cannot reach the first, where its ranks meet; else warn. `edges`: of each node, by number."""
    first = min(range(len(claims)), key=lambda number: int(claims[number]["rank"]))
    for target, claim in enumerate(claims):
        causes = {source: failed[str(target)] for source, failed in enumerate(edges) if str(target) in failed}
        if not causes:
            continue
        sources = [str(claims[source]["host"]) for source in causes]
        cause = next(iter(causes.values()))
        error = closed_data_ports(sources, claim["host"], port=claim.get("probe_port", 0), reason=cause)
        if target == first:
            raise error
        print_message(
            f"WARNING: {error.what}; ranks whose data takes that way will wait. Next: {error.next_step}"
        )


def _door(number: int, claim: Claim) -> ProbeTarget | None:
    """None where the node has none, or its name is not known here: of that others tell."""
    with contextlib.suppress(OSError, KeyError, TypeError, ValueError, OverflowError):
        found = socket.getaddrinfo(claim["address"], claim["probe_port"], type=socket.SOCK_STREAM)
        address = str(found[0][4][0])
        return ProbeTarget(number, claim["host"], "", address, claim["probe_port"], claim["probe_token"])
    return None
