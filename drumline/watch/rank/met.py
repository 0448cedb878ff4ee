"""What a rank knows of the watch when it begins: where it is kept, who else is there."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from drumline.launch.rank_environment import WatchSettings
from drumline.launch.topology import Topology
from drumline.watch.rank.listening import listen
from drumline.watch.sidecar.sidecar_options import Peer


@dataclass(frozen=True)
class Met:
    """After the ranks have met, or were told by their launcher."""

    folder: Path
    """Of this node."""
    secret: str = field(repr=False)
    """What sidecars of this run prove themselves by."""
    peers: tuple[Peer, ...]
    """The sidecars of the other nodes; none on one node."""
    node: int
    ranks: tuple[int, ...]
    """Of this node, in order."""
    is_first: bool
    """Whether this rank is the one of its node that starts the sidecar."""
    listener: socket.socket | None
    """On the first rank of each node, when there are several."""


def met_by_launcher(told: WatchSettings, topology: Topology, *, node: int) -> Met:
    """For ranks that have no store of ours to meet in. The other nodes' names come with their first words."""
    assert told.folder is not None
    is_first, first = topology.local_rank == 0, topology.rank - topology.local_rank
    peers = [Peer(number, address, address, port) for number, (address, port) in enumerate(told.nodes)]
    several = len(peers) > 1
    return Met(
        folder=told.folder,
        secret=told.secret or "",
        peers=tuple(peer for peer in peers if peer.node != node) if several else (),
        node=node,
        ranks=tuple(range(first, first + topology.local_world_size)),
        is_first=is_first,
        listener=listen(*told.nodes[node]) if several and is_first else None,
    )
