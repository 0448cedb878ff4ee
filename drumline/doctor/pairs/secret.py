"""How a node and node 0 know each other by hand: a secret that both have, which never travels.

Each side sends a number that was never used before, and proves that it knows the secret by a keyed hash over both.
Without one (DRUMLINE_SECRET not set anywhere) the network is trusted, as PyTorch's own store does.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

VARIABLE = "DRUMLINE_SECRET"
NONCE_BYTES = 16


def nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def proof(secret: str, who: Literal["master", "node"], nonces: tuple[str, str], node: int, nodes: int) -> str:
    """Of one side: the role is in it, so that nobody can send back what it was sent."""
    text = "\0".join(("drumline doctor", who, *nonces, str(node), str(nodes)))
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())
