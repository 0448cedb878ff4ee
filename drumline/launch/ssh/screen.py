"""One screen for the output of all ranks. A terminal that is paused, or a pipe without a reader,
blocks nothing.

A separate thread writes the lines. When it cannot keep up, lines are left out and counted; the
files on the nodes have all of them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from drumline.base.json_output import as_objects, is_wrapped
from drumline.base.text import coloured_line, one_line, paragraph

MAX_WAITING = 20_000
CLOSE_S = 5.0


class Screen:
    """Used from one thread; lines appear in order."""

    def __init__(self, out: int = 1, err: int = 2) -> None:
        # Without Python's own buffers: these would be flushed again at the exit, and fail if there
        # is no reader.
        self._fds = {"out": out, "err": err}
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._waiting: queue.Queue[tuple[str, str] | None] = queue.Queue(MAX_WAITING)
        self._num_dropped = 0
        self._num_written = 0
        self._thread = threading.Thread(target=self._write_all, name="screen", daemon=True)
        self._thread.start()

    def report(self, text: str, *, is_error: bool = False) -> None:
        """Print a message of Drumline's."""
        self._put("err" if is_error else "out", paragraph(text))

    def show(
        self, place: Mapping[str, Any], lines: Iterable[str], *, is_error: bool = False
    ) -> None:
        """Show lines of a rank or a host."""
        stream = "err" if is_error else "out"
        if is_wrapped():
            for line in as_objects(lines, place, is_authority=True):
                self._put(stream, f"{line}\n")
            return
        label = one_line(" ".join(map(str, place.values())))
        for line in lines:
            self._put(stream, f"[{label}] {coloured_line(line)}\n")

    def report_last(self, text: str, *further_lines: str) -> None:
        """Print one of the last messages, on stderr. The job is over: a slow screen may block us
        now."""
        self._put_last(("err", paragraph(text, *further_lines)))

    def close(self) -> None:
        """Wait until everything is written, as long as there is a reader."""
        self._put_last(None)
        before = -1
        while self._thread.is_alive() and self._num_written != before:
            before = self._num_written
            self._thread.join(CLOSE_S)

    def _put_last(self, item: tuple[str, str] | None) -> None:
        """For lines that must not be left out: wait for room in the queue, as long as there is a
        reader."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(item, timeout=CLOSE_S)

    def _put(self, stream: str, text: str) -> None:
        """Without waiting: what has no room in the queue is left out."""
        try:
            if self._num_dropped:
                notice = f"{self._num_dropped:,} lines are not shown; the logs have them"
                self._waiting.put_nowait(("err", paragraph(notice)))
                self._num_dropped = 0
            self._waiting.put_nowait((stream, text))
        except queue.Full:
            self._num_dropped += 1

    def _write_all(self) -> None:
        """The thread: write what waits until `close`."""
        while (item := self._waiting.get()) is not None:
            stream, text = item
            data = text.encode(self._encoding, "backslashreplace")
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(self._fds[stream], data) :]
                    self._num_written += 1
