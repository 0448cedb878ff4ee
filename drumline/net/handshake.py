"""Two processes prove to each other that both have a secret, without sending it, and agree on
session keys.

    dialler                                                 listener
    {"drumline": PURPOSE, "node", "to", "nonce", "secret"}
                                                            {"nonce"}
    {"proof"}
                                                            {"proof"}, or {"refused", "next"}

A proof is a keyed hash over both first messages and the role, so that it is valid for this
connection only. The lines after it are sealed (frames.py) but not encrypted, and contain no
secrets. If neither side has a secret (`"secret": false`), the network is trusted, as in PyTorch's
own store. This module does not use sockets.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Container, Generator
from dataclasses import dataclass
from typing import Any

from drumline.base.job_secret import SECRET_ENV, keyed_hash
from drumline.net.frames import NOT_JSON, FrameError, Message, Session, encode

# Limits until the handshake has succeeded: the length of a line, and the time.
MAX_HANDSHAKE_BYTES = 1 << 10
HANDSHAKE_S = 3.0
NONCE = re.compile(r"[0-9a-f]{32}", re.ASCII)

UNKNOWN_NODE = "not a node that may connect to this one"
WRONG_SECRET = f"another {SECRET_ENV}"
NOT_TAKEN = f"refused our {SECRET_ENV}"


class RefusedError(FrameError):
    """The other side may not connect. `what` and `next_step` are sent to it, for its user."""

    def __init__(
        self, what: str, *, next_step: str | None = None, kind: str = WRONG_SECRET
    ) -> None:
        super().__init__(kind, what, next_step=next_step)


@dataclass(frozen=True)
class Agreed:
    """The result of a handshake: the other node, the session, and the last message, if this side
    must still send it."""

    node: int
    session: Session
    last: Message | None = None


# A generator: it yields messages to send, and receives those that arrive.
Handshake = Generator[Message | None, Message, Agreed]


def dial(secret: bytes | None, purpose: str, me: int, to: int, **facts: Any) -> Handshake:
    """The dialler's side, which sends its proof first. `facts`: what else the listener should know
    about this node."""
    hello = {
        "drumline": purpose,
        "node": me,
        "to": to,
        "nonce": nonce(),
        "secret": secret is not None,
        **facts,
    }
    challenge = yield hello
    _check_not_refused(challenge)
    _check_nonce(challenge)
    answer = yield {"proof": _proof(secret, "dialler", hello, challenge)}
    _check_not_refused(answer)
    if not _is_proof(answer.get("proof"), _proof(secret, "listener", hello, challenge)):
        raise FrameError(WRONG_SECRET)
    return Agreed(to, _session(secret, ("to listener", "to dialler"), hello, challenge))


def answer(
    secret: bytes | None,
    purpose: str,
    me: int,
    callers: Container[int],
    admit: Callable[[Message], None] = lambda hello: None,
) -> Handshake:
    """The listener's side. `callers`: the nodes that may connect. `admit` raises RefusedError for a
    node that is proved to be of this job but may not connect."""
    hello = yield None
    node = hello.get("node")
    is_for_us = hello.get("drumline") == purpose and hello.get("to") == me
    # Not isinstance: bool is a subclass of int.
    if not is_for_us or type(node) is not int or node not in callers:
        raise FrameError(UNKNOWN_NODE)

    _check_nonce(hello)
    if hello.get("secret") is not (secret is not None):
        with_secret, without = (me, node) if secret is not None else (node, me)
        what = f"{SECRET_ENV} is set on node {with_secret} and not on node {without}"
        raise RefusedError(what, next_step="set it to one value on all nodes, or on none")

    challenge = {"nonce": nonce()}
    proof = (yield challenge).get("proof")
    if not _is_proof(proof, _proof(secret, "dialler", hello, challenge)):
        what = f"{SECRET_ENV} of node {node} differs from that of node {me}"
        raise RefusedError(what, next_step="set it to one value on all nodes")

    admit(hello)
    session = _session(secret, ("to dialler", "to listener"), hello, challenge)
    return Agreed(node, session, {"proof": _proof(secret, "listener", hello, challenge)})


def nonce() -> str:
    """A value that is used once."""
    return secrets.token_hex(16)


def _check_nonce(message: Message) -> None:
    value = message.get("nonce")
    if not isinstance(value, str) or NONCE.fullmatch(value) is None:
        raise FrameError(NOT_JSON, "received no nonce")


def _check_not_refused(reply: Message) -> None:
    if "refused" in reply:
        step = reply.get("next")
        raise RefusedError(
            str(reply["refused"]), next_step=step if isinstance(step, str) else None, kind=NOT_TAKEN
        )


def _proof(secret: bytes | None, role: str, hello: Message, challenge: Message) -> str | None:
    return None if secret is None else _hash(secret, role, hello, challenge).hex()


def _is_proof(proof: object, expected: str | None) -> bool:
    if expected is None:
        return proof is None
    if not isinstance(proof, str):
        return False
    return hmac.compare_digest(proof.encode(errors="replace"), expected.encode())


def _session(
    secret: bytes | None, roles: tuple[str, str], hello: Message, challenge: Message
) -> Session:
    if secret is None:
        return Session()
    return Session(*(_hash(secret, role, hello, challenge) for role in roles))


def _hash(secret: bytes, role: str, hello: Message, challenge: Message) -> bytes:
    transcript = [encode(dict(sorted(message.items()))).decode() for message in (hello, challenge)]
    return keyed_hash(secret, "drumline handshake", role, *transcript)
