"""The secret that all processes of one job know: strangers neither read nor forge what they tell each other.

It travels in the environment of processes and through ssh's stdin, never on a command line, in a log or over a network
in clear. Whoever starts all nodes makes it; where users start them one by one, they set DRUMLINE_SECRET on each.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from drumline.errors import UsageError
from drumline.launch.proof import keyed_hash

VARIABLE = "DRUMLINE_SECRET"
# Whoever records a proof can try words until one fits: short ones are found.
LEAST_LETTERS = 16


def new_secret() -> str:
    """For one job."""
    return secrets.token_hex(32)


def secret_from(environment: Mapping[str, str]) -> str | None:
    """What the launcher or the user has set; None: nothing."""
    secret = environment.get(VARIABLE) or None
    if secret is not None and len(secret) < LEAST_LETTERS:
        raise UsageError(
            f"{VARIABLE} has {len(secret)} characters; fewer than {LEAST_LETTERS} can be guessed",
            next_step=f"export {VARIABLE}=$(openssl rand -hex 32) on one node, and set the same value on all others",
        )
    return secret


def derived(secret: str, *purpose: str) -> str:
    """The secret for one purpose: who learns it does not know the one that it was made from, nor another."""
    return keyed_hash(secret.encode(), "drumline job", *purpose).hex()
