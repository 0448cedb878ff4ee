"""The secret of one start, where none was given to all: the one who leads makes it, and encrypts it
for each of the others with the public key of its card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.base.errors import PreflightError
from drumline.base.job_secret import SECRET_ENV
from drumline.net.key_exchange import KeyPair


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
