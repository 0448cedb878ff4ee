"""One connection between two sidecars: bytes become lines, lines become messages; whoever is not ours is cut off.

A stranger gets a thousand bytes and three seconds to prove who it is. What is buffered is bounded in both directions.
"""

from __future__ import annotations

import asyncio
import errno
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, cast

from drumline.net.handshake import SEAL_BYTES
from drumline.watch.cluster_state import Answer
from drumline.watch.sidecar.wire import (
    MAX_BYTES,
    MAX_STRANGER_BYTES,
    TOO_LONG,
    WRONG_SECRET,
    Agreed,
    Handshake,
    Message,
    Session,
    WireError,
    decode,
    encode,
)

HANDSHAKE_S = 3.0
MAX_UNSENT_BYTES = 2 << 20
REFUSED, SILENT, NO_ROUTE = "connection refused", "no answer", "no route to host"
CLOSED, MUTE = "closed by it", "takes connections but says nothing"
LATE = "did not say in time who it is"
CAUSES = {
    errno.ECONNREFUSED: REFUSED,
    errno.ECONNRESET: CLOSED,
    errno.EPIPE: CLOSED,
    errno.ETIMEDOUT: SILENT,
    errno.EHOSTUNREACH: NO_ROUTE,
    errno.ENETUNREACH: NO_ROUTE,
}
ANSWERS = {REFUSED: Answer.REFUSED, CLOSED: Answer.TAKEN, MUTE: Answer.TAKEN, LATE: Answer.TAKEN}
"""What shows that the host is there."""


def cause_of(error: OSError) -> str:
    """In the words above, where there is one."""
    if isinstance(error, TimeoutError):
        return SILENT
    return CAUSES.get(error.errno or 0) or (error.strerror or str(error)).lower()


class Owner(Protocol):
    """Who is told what happens on a line."""

    def line_made(self, line: Line) -> None: ...
    def line_opened(self, line: Line, node: int) -> None: ...
    def line_heard(self, line: Line, message: Message) -> None: ...
    def line_ended(self, line: Line) -> None: ...


class Line(asyncio.Protocol):
    """Made when a connection is, by either side. `why`: how it ended."""

    def __init__(self, owner: Owner, handshake: Handshake, *, is_ours: bool) -> None:
        """`is_ours`: we dialled."""
        self._owner, self._handshake, self.is_ours = owner, handshake, is_ours
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self.node: int | None = None
        """Who is there, once that is proved."""
        self.since = math.inf
        """When that was."""
        self.address = ""
        self.why = ""
        self.is_refused = False
        """Whether it ended because of what came, rather than by the network or our own will."""
        self.ended = asyncio.Event()

    def send(self, message: Mapping[str, Any], *, max_unsent: int = MAX_UNSENT_BYTES) -> bool:
        """Never waits; False when nothing more can be taken. Raises WireError for what can go over no line."""
        transport, session = self._transport, self._session
        if transport is None or session is None or self.why or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > max_unsent:
            return False
        transport.write(session.seal(message))
        return True

    def end(self, why: str, *, is_refused: bool = False) -> None:
        """At once; what was not sent yet is lost."""
        if not self.why:
            self.why, self.is_refused = why, is_refused
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = str((transport.get_extra_info("peername") or ("?",))[0])
        self._owner.line_made(self)
        late = partial(self.end, MUTE) if self.is_ours else partial(self.end, LATE, is_refused=True)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, late)
        self._say(next(self._handshake))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            self._take_lines()
        except WireError as error:
            if error.what == WRONG_SECRET:
                self._say({"refused": error.what})  # so that a node with another secret can tell its user
            self.end(error.what, is_refused=True)

    def connection_lost(self, error: Exception | None) -> None:
        self.why = self.why or (cause_of(error) if isinstance(error, OSError) else CLOSED)
        if self._timer is not None:
            self._timer.cancel()
        self._handshake.close()
        self._buffer.clear()
        self.ended.set()
        self._owner.line_ended(self)

    def _take_lines(self) -> None:
        while not self.why:
            limit = MAX_STRANGER_BYTES if self._session is None else MAX_BYTES + SEAL_BYTES + 1
            end = self._buffer.find(b"\n")
            if max(end, len(self._buffer) if end < 0 else 0) > limit:
                raise WireError(TOO_LONG)
            if end < 0:
                return
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._take(line)

    def _take(self, line: bytes) -> None:
        if self._session is not None:
            self._owner.line_heard(self, self._session.open(line))
            return
        try:
            self._say(self._handshake.send(decode(line)))
        except StopIteration as done:
            self._open(done.value)

    def _open(self, agreed: Agreed) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._say(agreed.last)
        self.node, self._session, self.since = agreed.node, agreed.session, time.monotonic()
        self._owner.line_opened(self, agreed.node)

    def _say(self, message: Message | None) -> None:
        """Unsealed: a word of the handshake."""
        if message is not None and self._transport is not None:
            self._transport.write(encode(message) + b"\n")
