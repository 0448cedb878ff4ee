"""The shared secret of all processes of a job, so that no other process can forge their messages.

It is passed in the environment of processes and through ssh's stdin, never on a command line, in a log or unencrypted
over a network. The launcher that starts all nodes makes it; users who start nodes one by one set DRUMLINE_SECRET.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from drumline.errors import UsageError

SECRET_ENV = "DRUMLINE_SECRET"
# An attacker who records a proof can try secrets until one matches: short ones are found.
LEAST_LETTERS = 16
KEY_BYTES = 32
PRIME = 2**255 - 19
BASE = (9).to_bytes(KEY_BYTES, "little")


def new_secret() -> str:
    """For one job."""
    return secrets.token_hex(32)


def secret_from(environment: Mapping[str, str]) -> str | None:
    """The secret that the launcher or the user has set, or None."""
    secret = environment.get(SECRET_ENV) or None
    if secret is not None and len(secret) < LEAST_LETTERS:
        raise UsageError(
            f"{SECRET_ENV} has {len(secret)} characters; fewer than {LEAST_LETTERS} can be guessed",
            next_step=f"export {SECRET_ENV}=$(openssl rand -hex 32) on one node, and set the same value on all others",
        )
    return secret


def derived(secret: str, *purpose: str) -> str:
    """The secret for one purpose, which reveals neither the original nor any other derived secret."""
    return keyed_hash(secret.encode(), "drumline job", *purpose).hex()


def keyed_hash(secret: bytes, *texts: str) -> bytes:
    """HMAC over texts that contain no zero byte, so characters cannot be moved from one text to the next."""
    return hmac.digest(secret, "\0".join(texts).encode(), hashlib.sha256)


class KeyPair:
    """One side of a Diffie-Hellman exchange (X25519) through a store that others can read.

    An attacker who only reads learns nothing. One who also writes, at the very start, can impersonate both sides;
    DRUMLINE_SECRET on all nodes prevents that too."""

    def __init__(self) -> None:
        self._private = secrets.token_bytes(KEY_BYTES)
        self.public = x25519(self._private, BASE).hex()

    def wrap(self, secret: str, their_public: object, *purpose: str) -> str | None:
        """The secret (64 hexadecimal digits), encrypted for the owner of that key; None: key or secret is invalid.
        `purpose`: what it is for. The other side unwraps it by the same call."""
        try:
            plain, public = bytes.fromhex(secret), bytes.fromhex(str(their_public))
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
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in reversed(range(255)):
        is_set = number >> bit & 1
        if is_set:
            x2, z2, x3, z3 = x3, z3, x2, z2
        one, other = (x2 + z2) ** 2 % PRIME, (x2 - z2) ** 2 % PRIME
        across, back = (x3 - z3) * (x2 + z2), (x3 + z3) * (x2 - z2)
        difference = one - other
        x2, z2 = one * other % PRIME, difference * (one + 121665 * difference) % PRIME
        x3, z3 = (across + back) ** 2 % PRIME, x1 * (across - back) ** 2 % PRIME
        if is_set:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, -1, PRIME) % PRIME if z2 else 0).to_bytes(KEY_BYTES, "little")
