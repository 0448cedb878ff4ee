"""Nodes whose sidecar was never heard, though their ranks train: a closed port, most often. That is said once."""

from __future__ import annotations

import math

from drumline.launch.rank_environment import WITHOUT_WATCH
from drumline.watch.sidecar.channel import Channel, Peer

# Sidecars start when all ranks have met, so nearly at once; on a busy host that takes a while.
PATIENCE_S = 30.0
MAX_NAMED = 3


class Unheard:
    """Of one sidecar."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._is_told = False

    def look(self, channel: Channel | None, now: float) -> str | None:
        """The warning, when it is time for it. `now`: for how long this process was there, and awake."""
        if channel is None or self._is_told or now < PATIENCE_S:
            return None
        self._is_told = True
        missing = [channel.peers[node] for node, age in channel.heard_s().items() if age == math.inf]
        return self._warning([_named(one, channel) for one in missing]) if missing else None

    def _warning(self, names: list[str]) -> str:
        more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
        return (
            f"warning: the watch on {self._host} hears nothing of {', '.join(names[:MAX_NAMED] + more)}: each side "
            "watches its own ranks alone, and may not know who holds up the run. Next: let the hosts reach each other "
            "on all TCP ports (drumline doctor --hosts tells which cannot), or train without the watchdog: "
            f"{WITHOUT_WATCH}"
        )


def _named(peer: Peer, channel: Channel) -> str:
    how = channel.how_silent(peer.node)
    return f"{peer.host} ({peer.address} port {peer.port}{f': {how}' if how else ''})"
