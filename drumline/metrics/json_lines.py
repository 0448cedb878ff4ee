"""A file of JSON lines that outlives kills and full disks: how the events and the sample ledger are kept.

A process that dies while it writes leaves an incomplete line. The next one to append starts a new line, and a reader
gets the incomplete one as a line without a record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from drumline.untrusted import open_append, open_regular, parse_json

MAX_LINE_BYTES = 16 << 20
"""A longer line is reported as unreadable, and never held in memory."""


class JsonLines:
    """Appends lines to a file, each handed to the system at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_append(path)
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            self._is_line_complete = file.read() in (b"", b"\n")

    def append(self, text: str) -> None:
        """Add one line. A process that is killed after this loses nothing of it."""
        line = text.encode() + b"\n"
        rest = line if self._is_line_complete else b"\n" + line
        # A write that fails half-way leaves an incomplete line; the next one then starts on a line of its own.
        self._is_line_complete = False
        while rest:
            rest = rest[self._file.write(rest) :]
        self._is_line_complete = True

    def flush(self) -> None:
        """Wait until all lines are on the device, so that they survive a power loss."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Line(NamedTuple):
    number: int
    """Counted from 1, as editors do."""
    record: dict[str, Any] | None
    """None: it is incomplete, or not a JSON object."""
    raw: bytes

    @property
    def is_ended(self) -> bool:
        """Whether it ends with a line break; only the last line of a file may not."""
        return self.raw.endswith(b"\n")


def read_lines(path: Path) -> Iterator[Line]:
    """Every line of a file in order, readable or not; empty ones are left out."""
    with open_regular(path) as file:
        for number, raw in enumerate(iter(lambda: _next_line(file), b""), start=1):
            if raw.strip():
                yield Line(number, parse_line(raw), raw)


def _next_line(file: BinaryIO) -> bytes:
    """Of a line that is too long only its beginning, and its line break if it has one."""
    raw = piece = file.readline(MAX_LINE_BYTES)
    while len(piece) == MAX_LINE_BYTES and not piece.endswith(b"\n"):
        piece = file.readline(MAX_LINE_BYTES)
        raw = raw[:80] + piece[-1:]
    return raw


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """The record of a line; None: it is incomplete, or not a JSON object."""
    try:
        record = parse_json(raw)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
