"""Gives a secret to another process through a store that others can read, by a Diffie-Hellman
exchange.

So a start gets its secret, where none was given to all: the one who leads makes it, and encrypts it
for each of the others with the public key of its card.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from drumline.base.errors import PreflightError
from drumline.base.job_secret import SECRET_ENV, keyed_hash

KEY_BYTES = 32


class KeyPair:
    """One side of a Diffie-Hellman exchange (X25519) through a store that others can read.

    An attacker who only reads learns nothing. One who also writes, at the very start, can
    impersonate both sides; DRUMLINE_SECRET on all nodes prevents that too."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw().hex()

    def wrap(self, secret: str, their_public: object, *purpose: str) -> str | None:
        """The secret (64 hexadecimal digits), encrypted for the owner of that key; None: key or
        secret is invalid. `purpose`: what it is for. The other side unwraps it by the same call."""
        try:
            plain = bytes.fromhex(secret)
            public = X25519PublicKey.from_public_bytes(bytes.fromhex(str(their_public)))
            # A ValueError too for a point of small order, whose multiples are known to everyone.
            shared = self._private.exchange(public)
        except ValueError:
            return None
        if len(plain) != KEY_BYTES:
            return None
        pad = keyed_hash(hashlib.sha256(shared).digest(), "drumline key exchange", *purpose)
        return bytes(byte ^ mask for byte, mask in zip(plain, pad, strict=True)).hex()


def wrap_secret(
    keys: KeyPair, secret: str, cards: Mapping[int, Mapping[str, Any]], name: str
) -> dict[str, Any]:
    """What the others read. `cards`: by rank. `name`: of the start."""
    wrapped = {
        rank: keys.wrap(secret, card.get("public"), name, str(rank)) for rank, card in cards.items()
    }
    return {"public": keys.public, "wrapped": wrapped}


def unwrap_secret(keys: KeyPair, published: Any, rank: int, name: str, *, who: str) -> str:
    """The secret, as published for this rank."""
    secret = None
    if isinstance(published, dict) and isinstance(published.get("wrapped"), dict):
        wrapped = str(published["wrapped"].get(str(rank)))
        secret = keys.wrap(wrapped, published.get("public"), name, str(rank))
    if secret is None:
        raise PreflightError(
            f"{who} could not read the secret of this start: its leader runs another version, or another process "
            "wrote it",
            next_step=f"install the same version on all nodes, and set {SECRET_ENV} to one value on all",
        )
    return secret
