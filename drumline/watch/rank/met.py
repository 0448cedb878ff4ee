"""What a rank knows of the watch once all have met; without torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from drumline.watch.sidecar.channel import Peer


@dataclass(frozen=True)
class Met:
    """What a rank knows of the watch after the meeting."""

    folder: Path
    """Of this node."""
    secret: str
    """What sidecars of this run prove themselves by."""
    peers: tuple[Peer, ...]
    """The sidecars of the other nodes; none on one node."""
    node: int
    ranks: tuple[int, ...]
    """Of this node, in order."""
    nodes: tuple[tuple[int, ...], ...]
    """The ranks of every node."""
    is_first: bool
    """Whether this rank is the one of its node that starts the sidecar."""
    listener: socket.socket | None
    """On the first rank of each node, when there are several."""
