"""Authenticated connections in an event loop: closed unless a handshake succeeds, and sealed after
it.

An unauthenticated peer may send a thousand bytes and has three seconds for the handshake. Buffers
are bounded.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, cast

from drumline.net.dial import Reason, reason_of
from drumline.net.frames import FrameError, LineBuffer, Message, Session, decode, encode
from drumline.net.handshake import HANDSHAKE_S, MAX_HANDSHAKE_BYTES, Agreed, Handshake, RefusedError

MAX_UNSENT_BYTES = 2 << 20
MAX_PENDING = 32
ACCEPTED_AT_ONCE = 16
ACCEPT_PAUSE_S = 1.0
LATE = "did not complete the handshake in time"
CROWDED = "dropped for a newer connection"


class ConnectionOwner(Protocol):
    """Called when something happens on a connection."""

    def connection_made(self, connection: PeerConnection) -> None: ...
    def connection_opened(self, connection: PeerConnection, node: int) -> None: ...
    def message_received(self, connection: PeerConnection, message: Message) -> None: ...
    def connection_ended(self, connection: PeerConnection) -> None: ...


class PeerConnection(asyncio.Protocol):
    """One connection, opened by either side. `why`: how it ended."""

    def __init__(self, owner: ConnectionOwner, handshake: Handshake, *, is_ours: bool) -> None:
        """`is_ours`: this process connected."""
        self._owner = owner
        self._handshake = handshake
        self.is_ours = is_ours
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._lines = LineBuffer(MAX_HANDSHAKE_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        self.node: int | None = None
        """The node at the other end, once the handshake has succeeded."""
        self.since = math.inf
        """When the handshake succeeded."""
        self.address = ""
        self.why = ""
        self.is_refused = False
        """Whether it was closed because of what the peer sent, not by the network or by us."""
        self.ended = asyncio.Event()

    def send(self, message: Mapping[str, Any], *, max_unsent: int = MAX_UNSENT_BYTES) -> bool:
        """Never blocks; False when the buffer is full. Raises FrameError for a message that is too
        long."""
        transport = self._transport
        session = self._session
        if transport is None or session is None or self.why or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > max_unsent:
            return False
        transport.write(session.encode(message))
        return True

    def end(self, why: str, *, is_refused: bool = False) -> None:
        """Close at once; what was not sent yet is lost."""
        if not self.why:
            self.why = why
            self.is_refused = is_refused
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = str((transport.get_extra_info("peername") or ("?",))[0])
        self._owner.connection_made(self)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._end_handshake)
        self._send_plain(next(self._handshake))

    def data_received(self, data: bytes) -> None:
        """Lines of the handshake, then frames; whatever is neither ends the connection."""
        self._lines.add(data)
        try:
            while not self.why and (line := self._lines.pop()) is not None:
                self._receive(line)
        except FrameError as error:
            if isinstance(error, RefusedError) and not self.is_ours:
                self._send_plain({"refused": error.what, "next": error.next_step})
            self.end(error.kind, is_refused=True)

    def connection_lost(self, error: Exception | None) -> None:
        """Note why, and inform the owner."""
        if not self.why:
            self.why = reason_of(error) if isinstance(error, OSError) else Reason.CLOSED
        if self._timer is not None:
            self._timer.cancel()
        self._handshake.close()
        self._lines.clear()
        self.ended.set()
        self._owner.connection_ended(self)

    def _end_handshake(self) -> None:
        if self.is_ours:
            self.end(Reason.NO_REPLY)
        else:
            self.end(LATE, is_refused=True)

    def _receive(self, line: bytes) -> None:
        """A frame of the peer, or the next step of the handshake."""
        if self._session is not None:
            self._owner.message_received(self, self._session.decode(line))
            return
        try:
            self._send_plain(self._handshake.send(decode(line, max_bytes=MAX_HANDSHAKE_BYTES)))
        except StopIteration as done:
            self._open(done.value)

    def _open(self, agreed: Agreed) -> None:
        """The handshake has succeeded: from here on lines are sealed."""
        if self._timer is not None:
            self._timer.cancel()
        self._send_plain(agreed.last)
        self.node = agreed.node
        self._session = agreed.session
        self.since = time.monotonic()
        self._lines.max_bytes = agreed.session.max_line
        self._owner.connection_opened(self, agreed.node)

    def _send_plain(self, message: Message | None) -> None:
        if message is not None and self._transport is not None:
            self._transport.write(encode(message) + b"\n")


class PendingConnections:
    """Connections whose handshake is not complete. When there are too many, the oldest is dropped:
    a handshake takes milliseconds, so a flood of idle sockets has the oldest. Each host of the job
    has its own limit."""

    def __init__(self, job_addresses: Collection[str]) -> None:
        """`job_addresses`: those of the job's hosts."""
        self._job_addresses = frozenset(job_addresses)
        # By group, in the order in which they were added.
        self._waiting: dict[str, dict[PeerConnection, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, connection: PeerConnection) -> None:
        """The oldest one of its group makes room."""
        waiting = self._waiting.setdefault(self._group(connection), {})
        if len(waiting) >= MAX_PENDING:
            oldest = next(iter(waiting))
            self.remove(oldest)
            oldest.end(CROWDED, is_refused=True)
        waiting[connection] = None

    def remove(self, connection: PeerConnection) -> None:
        """Its handshake succeeded, or it ended; a connection that was never added is ignored."""
        self._waiting.get(self._group(connection), {}).pop(connection, None)

    def _group(self, connection: PeerConnection) -> str:
        return connection.address if connection.address in self._job_addresses else ""


class Acceptor:
    """Accepts connections at a port, a few at a time, and leaves none open when it closes;
    asyncio's server leaks one that arrives then (seen with Python 3.11). It owns the socket; other
    processes that have it open keep it."""

    def __init__(
        self, listener: socket.socket, make_connection: Callable[[], PeerConnection]
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._make_connection = make_connection
        self._accepting: set[asyncio.Task[Any]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def open(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def close(self) -> None:
        """May be called twice."""
        if self._listener.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        self._listener.close()
        await asyncio.gather(*self._accepting, return_exceptions=True)

    def _accept(self) -> None:
        """Take what waits, a few at a time."""
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                # this process has no file descriptor left: only this caller waits
                loop.remove_reader(self._listener)
                self._pause = loop.call_later(ACCEPT_PAUSE_S, self.open)
                return
            accepted.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(self._make_connection, accepted))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)
