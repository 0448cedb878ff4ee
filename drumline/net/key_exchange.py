"""Gives a secret to another process through a store that others can read, by a Diffie-Hellman
exchange."""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from drumline.base.job_secret import keyed_hash

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
