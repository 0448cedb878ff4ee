"""What the coordinator and the nodes say to each other: one JSON object per line, bounded in size.

A request names one of a few fixed actions; nothing that is received is ever run or evaluated. What does not have the
form that is expected is an error, which names what came.
"""

from __future__ import annotations

import json
import os
import selectors
from collections.abc import Mapping
from typing import Any

from drumline.errors import PreflightError
from drumline.net.handshake import SEAL_BYTES, LineSeal

Message = dict[str, Any]
# Facts of a machine with some hundred packages, and what one host found out about 255 others, are below 200 kB.
MAX_BYTES = 1 << 20
SHOWN = 80
BROKEN_SEAL = "a line came whose seal is not right: somebody between the hosts has changed or added it"


class MessageError(PreflightError):
    """What came is no message of ours."""


def encode(message: Mapping[str, Any], seal: LineSeal | None = None) -> bytes:
    """One line."""
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) >= MAX_BYTES:
        raise MessageError(f"a message of {len(text):,} bytes is over the limit of {MAX_BYTES:,}")
    return text + b"\n" if seal is None else seal.seal(text)


def decode(line: bytes) -> Message:
    """The message of one line."""
    if len(line) > MAX_BYTES:
        raise MessageError(f"a line of {len(line):,} bytes came, over the limit of {MAX_BYTES:,}")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"what came is no JSON: {_shown(line)}") from error
    if not isinstance(message, dict):
        raise MessageError(f"what came is no JSON object: {_shown(line)}")
    return message


def want(
    message: Mapping[str, Any],
    name: str,
    kind: type[Any],
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """An argument of the kind and within the bounds that its action takes."""
    value: Any = message.get(name)
    # True is an int to Python, and never what a number means here.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise MessageError(f"{name} is {_shown(value)}; {kind.__name__} is needed")
    if (low is not None and value < low) or (high is not None and value > high):
        raise MessageError(f"{name} is {_shown(value)}; {low} to {high} is allowed")
    return value


def want_list(message: Mapping[str, Any], name: str, kind: type, most: int) -> list[Any]:
    """A list of things of one kind, not longer than it may be."""
    values = want(message, name, list)
    if len(values) > most:
        raise MessageError(f"{name} has {len(values):,} entries; up to {most:,} are allowed")
    for value in values:
        want({name: value}, name, kind)
    return list(values)


class Lines:
    """The lines that come from a pipe or a connection."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.seal: LineSeal | None = None
        """Once both sides have proved themselves, where there is a secret."""
        self._buffer = bytearray()

    def next(self, patience_s: float) -> bytes | None:
        """The next line; None when the other side has ended, or has been silent for so long."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.source, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if len(self._buffer) > MAX_BYTES + SEAL_BYTES:
                    raise MessageError(f"a line of over {MAX_BYTES:,} bytes came, which is the limit")
                if not selector.select(patience_s) or not self._take():
                    return None
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = bytearray(rest)
        text = bytes(line) if self.seal is None else self.seal.open(bytes(line))
        if text is None:
            raise MessageError(BROKEN_SEAL)
        return text

    def _take(self) -> bool:
        try:
            new = os.read(self.source, 1 << 16)
        except OSError:
            return False
        self._buffer += new
        return bool(new)


def send(target: int, message: Mapping[str, Any], seal: LineSeal | None = None) -> None:
    """Write a message whole; a pipe may take it in pieces."""
    rest = memoryview(encode(message, seal))
    while rest:
        rest = rest[os.write(target, rest) :]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
