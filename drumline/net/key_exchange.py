"""Gives a secret to another process through a store that others can read, by a Diffie-Hellman
exchange."""

from __future__ import annotations

import hashlib
import secrets

from drumline.base.job_secret import keyed_hash

KEY_BYTES = 32


PRIME = 2**255 - 19


BASE = (9).to_bytes(KEY_BYTES, "little")


class KeyPair:
    """One side of a Diffie-Hellman exchange (X25519) through a store that others can read.

    An attacker who only reads learns nothing. One who also writes, at the very start, can
    impersonate both sides; DRUMLINE_SECRET on all nodes prevents that too."""

    def __init__(self) -> None:
        self._private = secrets.token_bytes(KEY_BYTES)
        self.public = x25519(self._private, BASE).hex()

    def wrap(self, secret: str, their_public: object, *purpose: str) -> str | None:
        """The secret (64 hexadecimal digits), encrypted for the owner of that key; None: key or
        secret is invalid. `purpose`: what it is for. The other side unwraps it by the same call."""
        try:
            plain = bytes.fromhex(secret)
            public = bytes.fromhex(str(their_public))
        except ValueError:
            return None
        if len(plain) != KEY_BYTES or len(public) != KEY_BYTES:
            return None
        shared = x25519(self._private, public)
        if not any(shared):  # a point of small order, whose multiples are known to everyone
            return None
        pad = keyed_hash(hashlib.sha256(shared).digest(), "drumline key exchange", *purpose)
        return bytes(one ^ other for one, other in zip(plain, pad, strict=True)).hex()


def x25519(scalar: bytes, point: bytes) -> bytes:
    """RFC 7748, section 5: the multiple of a point on Curve25519, both as 32 bytes."""
    number = int.from_bytes(scalar, "little") & (1 << 255) - 8 | 1 << 254
    x1 = (int.from_bytes(point, "little") & (1 << 255) - 1) % PRIME
    x2 = 1
    z2 = 0
    x3 = x1
    z3 = 1
    for bit in reversed(range(255)):
        is_set = number >> bit & 1
        if is_set:
            x2, z2, x3, z3 = x3, z3, x2, z2
        one = (x2 + z2) ** 2 % PRIME
        other = (x2 - z2) ** 2 % PRIME
        across = (x3 - z3) * (x2 + z2)
        back = (x3 + z3) * (x2 - z2)
        difference = one - other
        x2 = one * other % PRIME
        z2 = difference * (one + 121665 * difference) % PRIME
        x3 = (across + back) ** 2 % PRIME
        z3 = x1 * (across - back) ** 2 % PRIME
        if is_set:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, -1, PRIME) % PRIME if z2 else 0).to_bytes(KEY_BYTES, "little")
