"""One screen for the output of all ranks. A terminal that does not scroll, or a pipe that is gone, blocks nobody.

A thread of its own writes the lines. When it cannot keep up, lines are left out of the screen, and counted; the files
on the nodes have them all.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Iterable

from drumline.terminal import coloured_line, one_line, paragraph

MAX_WAITING = 20_000
CLOSE_S = 5.0


class Screen:
    """Used from one thread; lines appear in order."""

    def __init__(self, out: int = 1, err: int = 2) -> None:
        # Past Python's own buffers: those would be written once more at the end, and fail if nobody reads.
        self._fds = {"out": out, "err": err}
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._waiting: queue.Queue[tuple[str, str] | None] = queue.Queue(MAX_WAITING)
        self._num_dropped = self._num_noted = 0
        self._num_written = 0
        self._thread = threading.Thread(target=self._write_all, name="screen", daemon=True)
        self._thread.start()

    def report(self, text: str, *, is_error: bool = False) -> None:
        """A line of Drumline's own."""
        self._put("err" if is_error else "out", paragraph(text))

    def show(self, label: str, lines: Iterable[str], *, is_error: bool = False) -> bool:
        """Lines of a rank or a host; whether none was left out."""
        before = self._num_dropped
        for line in lines:
            self._put("err" if is_error else "out", f"[{one_line(label)}] {coloured_line(line)}\n")
        return self._num_dropped == before

    def report_last(self, text: str, *more: str) -> None:
        """One of the last messages, on stderr. The job is over: a slow screen may block us now."""
        self._put_last(("err", paragraph(text, *more)))

    def close(self) -> None:
        """Wait until all is written, as long as somebody reads it."""
        self._put_last(None)
        before = -1
        while self._thread.is_alive() and self._num_written != before:
            before = self._num_written
            self._thread.join(CLOSE_S)

    def _put_last(self, item: tuple[str, str] | None) -> None:
        """For what must not be left out: what waits before it is written first, or nobody reads."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(item, timeout=CLOSE_S)

    def _put(self, stream: str, text: str) -> None:
        try:
            if count := self._num_dropped - self._num_noted:
                self._waiting.put_nowait(("err", paragraph(f"{count:,} lines are not shown; the logs have them")))
                self._num_noted = self._num_dropped
            self._waiting.put_nowait((stream, text))
        except queue.Full:
            self._num_dropped += 1

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            stream, text = item
            data = text.encode(self._encoding, "backslashreplace")
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._fds[stream], data) :]
                    self._num_written += 1
