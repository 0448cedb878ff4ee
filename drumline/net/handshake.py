"""How two programs show each other that both have a secret, which never travels, and seal what they say after that.

Each side sends a number that was never used before, and proves that it knows the secret by a keyed hash over both.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

NONCE_BYTES = 16
NONCE = re.compile(r"[0-9a-f]{32}", re.ASCII)
SEAL_BYTES = 64


def nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def is_nonce(given: object) -> bool:
    return isinstance(given, str) and NONCE.fullmatch(given) is not None


def is_proof(given: object, expected: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), expected.encode())


class LineSeal:
    """Both directions of one connection. A seal is a keyed hash over the line's number and text, with a key for this
    connection and this direction: what somebody on the way has recorded, changed, left out or put in does not open."""

    def __init__(self, mine: bytes, theirs: bytes) -> None:
        self._mine, self._theirs = mine, theirs
        self._sent = self._received = 0

    def seal(self, text: bytes) -> bytes:
        """The next line to send, which then must be sent."""
        line = _seal(self._mine, self._sent, text) + b" " + text + b"\n"
        self._sent += 1
        return line

    def open(self, line: bytes) -> bytes | None:
        """The text of the next line that came; None: its seal is not right."""
        text = line[SEAL_BYTES + 1 :]
        if not hmac.compare_digest(line[: SEAL_BYTES + 1], _seal(self._theirs, self._received, text) + b" "):
            return None
        self._received += 1
        return text


def _seal(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + text, hashlib.sha256).hex().encode()
