"""How a node and node 0 know each other by hand: by a secret that both have (`net/handshake.py`).

Without one (DRUMLINE_SECRET not set anywhere) the network is trusted, as PyTorch's own store does.
"""

from __future__ import annotations

from typing import Literal

from drumline.net.handshake import LineSeal
from drumline.net.secrets import keyed_hash


def proof(secret: str, who: Literal["master", "node"], nonces: tuple[str, str], node: int, nodes: int) -> str:
    """Of one side: the role is in it, so that nobody can send back what it was sent."""
    return keyed_hash(secret.encode(), "drumline doctor", who, *nonces, str(node), str(nodes)).hex()


def line_seal(
    secret: str, who: Literal["master", "node"], nonces: tuple[str, str], node: int, nodes: int
) -> LineSeal:
    """For what is said after both have proved themselves: who sits between them can neither add nor change a line."""
    words = (*nonces, str(node), str(nodes))
    to_node, to_master = (
        keyed_hash(secret.encode(), "drumline doctor", way, *words) for way in ("to node", "to master")
    )
    return LineSeal(to_node, to_master) if who == "master" else LineSeal(to_master, to_node)
