"""The log files of ranks: their names, their last lines, and new lines for the screen.

A screen is slower than a file: when too much is written, a part is left out on the screen, and a
line says how much.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from drumline.base.untrusted import open_regular

MAX_LINE = 4000
MAX_READ = 1 << 16
# A follower that is further behind than this shows only the first and the last few lines.
MAX_LAG = 1 << 22
KEPT_OF_LAG = 1 << 13
# At the end nothing can be shown later: too much output would hide the last lines.
MAX_REST = 1 << 20
LAST_LINES = 80
WITHOUT_TRACEBACK = 20
# A traceback that was written this shortly before the exit explains the exit.
LAST_WORDS_S = 30.0
# A progress bar rewrites one line, without a newline.
PROGRESS_EVERY_S = 2.0


def rank_output(folder: Path, rank: int, start: int) -> tuple[Path, Path]:
    """The files of a rank's stdout and stderr: `rank-00003.out`; those of a later start:
    `rank-00003.restart-1.out`."""
    stem = f"rank-{rank:05d}" + (f".restart-{start}" if start else "")
    return folder / f"{stem}.out", folder / f"{stem}.err"


def rank_file(folder: Path, rank: int, start: int) -> Path:
    """Beside them: the number that the rank has now, if the group of nodes has changed."""
    return rank_output(folder, rank, start)[0].with_suffix(".rank")


class LogFollower:
    """Reads new lines of a file, which need not exist yet."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._offset = _size(path) if from_end else 0
        self._partial = b""
        self._shown_at = time.monotonic()

    def read(self, max_lag: int = MAX_LAG) -> list[str]:
        """The lines that are complete by now."""
        if self._lag() <= max_lag:
            return self._take(self._new_bytes())

        lines = self._take(self._new_bytes(KEPT_OF_LAG))
        skipped = max(0, self._lag() - KEPT_OF_LAG)
        self._offset += skipped
        self._partial = b""
        return [*lines, f"... {skipped:,} bytes are not shown; see {self.path}"]

    def rest(self) -> list[str]:
        """The remaining lines, when the writer has exited; the last line may be incomplete."""
        lines = self.read(MAX_REST)

        # A process that a rank left running may write faster than this reads.
        end = _size(self.path)
        while self._offset < end and (new_bytes := self._new_bytes()):
            lines += self._take(new_bytes)

        if self._partial:
            lines.append(decoded(self._partial))
        self._partial = b""
        return lines

    def _new_bytes(self, most: int = MAX_READ) -> bytes:
        """What was written since the last call; empty if the file cannot be read."""
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset)
                data = file.read(most)
        except OSError:
            return b""

        self._offset += len(data)
        return data

    def _lag(self) -> int:
        """How many bytes are not read yet."""
        return _size(self.path) - self._offset

    def _take(self, data: bytes) -> list[str]:
        """The lines that are complete with these bytes."""
        *whole, self._partial = (self._partial + data).split(b"\n")
        is_due = time.monotonic() - self._shown_at > PROGRESS_EVERY_S
        if b"\r" in self._partial and is_due:
            progress, _, self._partial = self._partial.rpartition(b"\r")
            whole.append(progress)
        elif len(self._partial) > MAX_READ:  # a line without an end
            whole.append(self._partial)
            self._partial = b""

        if whole:
            self._shown_at = time.monotonic()
        return [decoded(line) for line in whole]


def _size(path: Path) -> int:
    """0 if there is no such file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def decoded(line: bytes) -> str:
    """A line for a screen: without what a progress bar has overwritten, and not too long."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2][: 4 * MAX_LINE].decode(errors="replace")
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]} ..."


def last_lines(path: Path) -> list[str]:
    """The last lines of a file, beginning with a traceback if there is one."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_READ))
            lines = [decoded(line) for line in file.read().splitlines()][-LAST_LINES:]
    except OSError:
        return []

    for number, line in enumerate(lines):
        if _is_traceback(line):
            return lines[number:]

    return lines[-WITHOUT_TRACEBACK:]


def failure_time(err: Path | None) -> float:
    """When a rank that has just exited failed: a process may take long to exit after its last
    output."""
    now = time.monotonic()
    if err is None or not any(map(_is_traceback, last_lines(err))):
        return now

    ago_s = time.time() - err.stat().st_mtime
    return now - ago_s if 0 < ago_s < LAST_WORDS_S else now


def _is_traceback(line: str) -> bool:
    """Also one that is indented, as in an exception group."""
    return line.lstrip().startswith("Traceback (most recent call last)")
