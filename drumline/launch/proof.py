"""How two programs show each other that both have a secret, which never travels.

Each side sends a number that was never used before, and proves that it knows the secret by a keyed hash over both.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

NONCE_BYTES = 16
NONCE = re.compile(r"[0-9a-f]{32}", re.ASCII)


def nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def is_nonce(given: object) -> bool:
    return isinstance(given, str) and NONCE.fullmatch(given) is not None


def keyed_hash(secret: bytes, *words: str) -> bytes:
    """Of words that hold no zero byte: then nobody can move letters from one to the next."""
    return hmac.digest(secret, "\0".join(words).encode(), hashlib.sha256)


def is_proof(given: object, expected: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), expected.encode())
