"""A host's open ports: others connect to them, and so learn what reaches this host.

A port is bound to one address, never to all. A caller must know the token of this examination, which travels over the
control channel alone; other callers are cut off without a reply. The reply names the node, since a name or an address
may lead to another host. All a caller can have is an echo, and its bytes counted.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

TOKEN_BYTES = 16
# The call: the token, the action, and for how many bytes and seconds. The reply: the number of the node.
CALL = struct.Struct("!16scQd")
REPLY = struct.Struct("!I")
PING, LARGE, SPEED = b"P", b"L", b"S"
PING_BYTES = 16
COUNT = struct.Struct("!Q")
COUNT_AND_SECONDS = struct.Struct("!Qd")
# A large message that has not moved for so long is not slow: TCP retransmits after 0.2 s, 0.4 s, ...
STALLED_S = 1.2
# Nobody may hold a thread of ours: an examination of two hosts takes fractions of a second.
IDLE_S = 3.0
MAX_CALLS = 2048
BUFFER_BYTES = 1 << 20


class Listeners:
    """All open ports of this node."""

    def __init__(self, token: bytes, node: int) -> None:
        self.token, self.node = token, node
        self._sockets: list[socket.socket] = []
        self._calls = threading.Semaphore(MAX_CALLS)

    def open(self, address: str, port: int = 0) -> int:
        """Listen there; 0 is any free high port. Returns the port."""
        listener = socket.create_server((address, port), backlog=1024)
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()
        return int(listener.getsockname()[1])

    def close(self) -> None:
        for listener in self._sockets:
            # Close alone would leave the thread in accept, and with it the port open.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                call, _ = listener.accept()
                if self._calls.acquire(blocking=False):
                    threading.Thread(target=self._serve, args=[call], daemon=True).start()
                else:
                    call.close()

    def _serve(self, call: socket.socket) -> None:
        try:
            with call, contextlib.suppress(OSError):
                call.settimeout(IDLE_S)
                call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                token, action, num_bytes, seconds = CALL.unpack(read_exactly(call, CALL.size))
                if token != self.token:
                    return
                call.sendall(REPLY.pack(self.node))
                while action == PING:
                    call.sendall(read_exactly(call, PING_BYTES))
                if action == LARGE:
                    call.sendall(COUNT.pack(_count_bytes(call, num_bytes)))
                elif action == SPEED:
                    _time_bytes(call, num_bytes, min(seconds, IDLE_S))
        finally:
            self._calls.release()


def read_exactly(call: socket.socket, num_bytes: int) -> bytes:
    """OSError when the other side closes, or sends nothing for too long."""
    got = b""
    while len(got) < num_bytes:
        new = call.recv(num_bytes - len(got))
        if not new:
            raise ConnectionResetError("closed by the other side")
        got += new
    return got


def _count_bytes(call: socket.socket, num_bytes: int) -> int:
    """How many arrive before it stalls: none at all when large packets vanish on the way."""
    call.settimeout(STALLED_S)
    buffer, taken = bytearray(1 << 16), 0
    with contextlib.suppress(TimeoutError):
        while taken < num_bytes and (new := call.recv_into(buffer)):
            taken += new
    call.settimeout(IDLE_S)
    return taken


def _time_bytes(call: socket.socket, num_bytes: int, seconds: float) -> None:
    """Read for a while, then send how much arrived and how long it took, counted from the first bytes."""
    buffer, taken = bytearray(BUFFER_BYTES), len(call.recv(1))
    begin = time.monotonic()
    elapsed = 0.0
    while taken < num_bytes and elapsed < seconds and (new := call.recv_into(buffer)):
        taken += new
        elapsed = time.monotonic() - begin
    call.sendall(COUNT_AND_SECONDS.pack(taken, elapsed))
    # Closing with unread bytes would reset the connection, and the answer could be lost with it.
    while call.recv_into(buffer):
        pass
