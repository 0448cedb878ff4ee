"""Takes connections at a sidecar's port, a few at a time, and leaves none open when it closes.

asyncio has a server for this, which loses a connection that comes while it is closed (seen with Python 3.11).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from drumline.watch.sidecar.line import Line

AT_ONCE = 16
PAUSE_S = 1.0


class Door:
    """From `open` to `close`. The socket is taken over; whoever else has it open keeps it."""

    def __init__(self, listener: socket.socket, make_line: Callable[[], Line]) -> None:
        listener.setblocking(False)
        self._listener, self._make_line = listener, make_line
        self._taking: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def open(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._take)

    async def close(self) -> None:
        """May be called twice."""
        if self._listener.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        self._listener.close()
        await asyncio.gather(*self._taking, return_exceptions=True)

    def _take(self) -> None:
        for _ in range(AT_ONCE):
            try:
                call, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no file is left to this process: the caller waits, and nobody else does
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                self._pause = loop.call_later(PAUSE_S, self.open)
                return
            task = asyncio.get_running_loop().create_task(self._greet(call))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)

    async def _greet(self, call: socket.socket) -> None:
        call.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(self._make_line, call)
