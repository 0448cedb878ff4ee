"""Follows a file that a rank writes to, and returns what is new as lines for a screen; the file keeps everything.

A screen is slower than a file: when too much is written, a part is left out, and a line says how much.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from drumline.untrusted import open_regular

MAX_LINE = 4000
MAX_READ = 1 << 16
# A follower that is further behind than this skips to the end, but for the first and the last few lines.
MAX_LAG = 1 << 22
KEPT_OF_LAG = 1 << 13
# At the end there is no later: more than a screen can take at once would cost the last lines.
MAX_REST = 1 << 20
WITHOUT_TRACEBACK = 20
# A progress bar moves on one line, which has no end.
PROGRESS_EVERY_S = 2.0


class LogFollower:
    """One file, which need not exist yet, and may be moved away and made anew."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        found = _size_and_inode(path) if from_end else None
        self._offset, self._inode = found or (0, 0)
        self._partial = b""
        self._in_long_line = False
        self._shown_at = time.monotonic()

    def read(self, max_lag: int = MAX_LAG) -> list[str]:
        """The lines that are complete by now."""
        if self._lag() <= max_lag:
            return self._take(self._new_bytes())
        lines = self._take(self._new_bytes(KEPT_OF_LAG))
        skipped = max(0, self._lag() - KEPT_OF_LAG)
        self._offset += skipped
        self._partial, self._in_long_line = b"", True  # until the next line begins
        return [*lines, f"... {skipped:,} bytes are not shown; see {self.path}"]

    def rest(self) -> list[str]:
        """When nobody writes any more: what is left, its last line complete or not."""
        lines = self.read(MAX_REST)
        # A process that a rank left behind may still write, faster than this reads.
        end = (_size_and_inode(self.path) or (0, 0))[0]
        while self._offset < end and (more := self._new_bytes()):
            lines += self._take(more)
        last, self._partial = self._partial, b""
        return [*lines, *([] if self._in_long_line or not last else [decoded(last)])]

    def _new_bytes(self, most: int = MAX_READ) -> bytes:
        found = _size_and_inode(self.path)
        if found is None:
            return b""
        size, inode = found
        if inode != (self._inode or inode) or size < self._offset:
            self._offset, self._partial = 0, b""
        self._inode = inode
        if size == self._offset:
            return b""
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset)
                data = file.read(most)
        except OSError:
            return b""
        self._offset += len(data)
        return data

    def _lag(self) -> int:
        return (_size_and_inode(self.path) or (self._offset, 0))[0] - self._offset

    def _take(self, data: bytes) -> list[str]:
        *whole, self._partial = (self._partial + data).split(b"\n")
        if whole and self._in_long_line:
            self._in_long_line = False
            del whole[0]
        lines = [decoded(line) for line in whole]
        if self._in_long_line:
            self._partial = b""
        elif len(self._partial) > MAX_LINE and b"\r" not in self._partial:
            lines.append(decoded(self._partial))
            self._partial, self._in_long_line = b"", True
        elif b"\r" in self._partial and time.monotonic() - self._shown_at > PROGRESS_EVERY_S:
            done, _, self._partial = self._partial.rpartition(b"\r")
            lines += [decoded(done)] if done else []
        if lines:
            self._shown_at = time.monotonic()
        return lines


def decoded(line: bytes) -> str:
    """A line for a screen: without what a progress bar has overwritten, and not too long."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2][: 4 * MAX_LINE].decode(errors="replace")
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]} ..."


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a file, from a traceback on if there is one within these lines."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_READ))
            lines = [decoded(line) for line in file.read().splitlines()][-count:]
    except OSError:
        return []
    begins = [number for number, line in enumerate(lines) if is_traceback(line)]
    return lines[begins[0] if begins else max(0, len(lines) - WITHOUT_TRACEBACK) :]


def is_traceback(line: str) -> bool:
    return line.lstrip().startswith("Traceback (most recent call last)")


def _size_and_inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_ino
