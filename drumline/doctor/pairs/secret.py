"""How a node and node 0 know each other by hand: by a secret that both have (`launch/proof.py`).

Without one (DRUMLINE_SECRET not set anywhere) the network is trusted, as PyTorch's own store does.
"""

from __future__ import annotations

from typing import Literal

from drumline.launch.proof import keyed_hash

VARIABLE = "DRUMLINE_SECRET"


def proof(secret: str, who: Literal["master", "node"], nonces: tuple[str, str], node: int, nodes: int) -> str:
    """Of one side: the role is in it, so that nobody can send back what it was sent."""
    return keyed_hash(secret.encode(), "drumline doctor", who, *nonces, str(node), str(nodes)).hex()
