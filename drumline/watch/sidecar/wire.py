"""What sidecars say to each other, as bytes: both sides prove that they know the secret, then sealed lines of JSON.

    dialler                                        listener
    {"drumline": "watch", "node", "to", "nonce"}
                                                   {"nonce"}
    {"proof"}
                                                   {"proof"}
    SEAL {...}                                     SEAL {...}

`net/handshake.py` seals lines. Their text can be read on the way; it tells about processes, and holds nothing secret.
Nothing here knows of sockets; `line.py` carries the bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from drumline.errors import DrumlineError
from drumline.net.handshake import LineSeal, is_nonce, is_proof, nonce
from drumline.net.secrets import keyed_hash

Message = dict[str, Any]
MAX_BYTES = 1 << 20
MAX_STRANGER_BYTES = 1 << 10
"""Of a line before the other side has proved who it is."""
FORM = "watch"

WRONG_SECRET, NOT_TAKEN = "does not know the secret", "does not take our secret"
STRANGE, BROKEN_SEAL = "is no node that has a line to this one", "a line whose seal is not right"
NO_JSON, TOO_LONG = "what is no JSON object", "a line that is too long"


class WireError(DrumlineError):
    """What came, or was to be sent, is not what these lines carry. The text is one of the above, for counting."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Infinity is let through, for what never happened; NaN is what nobody meant to say."""
    try:
        text = json.dumps(message, separators=(",", ":"))
        if "NaN" in text or "-Infinity" in text:
            decode(text.encode())  # unless it is in a word
    except ValueError as error:
        raise WireError(NO_JSON) from error
    if len(text) > MAX_BYTES:  # as ASCII, which json writes
        raise WireError(TOO_LONG)
    return text.encode()


def decode(text: bytes | memoryview) -> Message:
    try:
        message = json.loads(bytes(text), parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(NO_JSON) from error
    if not isinstance(message, dict):
        raise WireError(NO_JSON)
    return message


def _constant(name: str) -> float:
    if name != "Infinity":
        raise ValueError(name)
    return math.inf


class Session:
    """Both directions of one connection."""

    def __init__(self, mine: bytes, theirs: bytes) -> None:
        self._lines = LineSeal(mine, theirs)

    def seal(self, message: Mapping[str, Any]) -> bytes:
        """The next line to send, which then must be sent."""
        return self._lines.seal(encode(message))

    def open(self, line: bytes) -> Message:
        """The message of the next line that came; its text is not even looked at before its seal is right."""
        text = self._lines.open(line)
        if text is None:
            raise WireError(BROKEN_SEAL)
        return decode(text)


@dataclass(frozen=True)
class Agreed:
    """The end of a handshake: who is there, and the last word that is still to be sent, if it is ours."""

    node: int
    session: Session
    last: Message | None = None


# What it yields is to be sent; what it is sent is what came.
Handshake = Generator[Message | None, Message, Agreed]


def dial(secret: bytes, me: int, node: int) -> Handshake:
    """The dialler's side. It proves first: a listener answers strangers with nothing but a number."""
    mine = nonce()
    theirs = _nonce_of((yield {"drumline": FORM, "node": me, "to": node, "nonce": mine}))
    words = (str(me), str(node), mine, theirs)
    answer = yield {"proof": _hash(secret, "dialler", *words).hex()}
    if "refused" in answer:
        raise WireError(NOT_TAKEN)
    if not is_proof(answer.get("proof"), _hash(secret, "listener", *words).hex()):
        raise WireError(WRONG_SECRET)
    return Agreed(node, Session(_hash(secret, "to listener", *words), _hash(secret, "to dialler", *words)))


def answer(secret: bytes, me: int, callers: Collection[int]) -> Handshake:
    """The listener's side. `callers`: the nodes that may dial this one."""
    hello = yield None
    node, theirs = hello.get("node"), _nonce_of(hello)
    # True is 1 to Python.
    if hello.get("drumline") != FORM or type(node) is not int or node not in callers or hello.get("to") != me:
        raise WireError(STRANGE)
    mine = nonce()
    words = (str(node), str(me), theirs, mine)
    if not is_proof((yield {"nonce": mine}).get("proof"), _hash(secret, "dialler", *words).hex()):
        raise WireError(WRONG_SECRET)
    session = Session(_hash(secret, "to dialler", *words), _hash(secret, "to listener", *words))
    return Agreed(node, session, {"proof": _hash(secret, "listener", *words).hex()})


def _hash(secret: bytes, *words: str) -> bytes:
    return keyed_hash(secret, "drumline watch", *words)


def _nonce_of(message: Message) -> str:
    given = message.get("nonce")
    if not is_nonce(given):
        raise WireError(NO_JSON)
    return str(given)
