"""The shared secret of all processes of a job, so that no other process can forge their messages.

It is passed in the environment of processes and through ssh's stdin, never on a command line, in a
log or unencrypted over a network. The launcher that starts all nodes makes it; users who start
nodes one by one set DRUMLINE_SECRET.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from drumline.base.errors import UsageError

SECRET_ENV = "DRUMLINE_SECRET"
# An attacker who records a proof can try secrets until one matches: short ones are found.
LEAST_LETTERS = 16


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
    """The secret for one purpose, which reveals neither the original nor any other derived
    secret."""
    return keyed_hash(secret.encode(), "drumline job", *purpose).hex()


def keyed_hash(secret: bytes, *texts: str) -> bytes:
    """HMAC over texts that contain no zero byte, so characters cannot be moved from one text to the
    next."""
    return hmac.digest(secret, "\0".join(texts).encode(), hashlib.sha256)
