"""A file of JSON lines that outlives kills and full disks: how the events and the sample ledger are kept.

A process that dies while it writes leaves a torn line. The next one to append starts a line of its own, and a reader
is told of the torn one rather than stopped by it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class JsonLines:
    """Appends lines to a file, each handed to the system at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._line_is_whole = _ends_whole(path)

    def append(self, text: str) -> None:
        """Add one line. A process that is killed after this loses nothing of it."""
        line = text.encode() + b"\n"
        rest = line if self._line_is_whole else b"\n" + line
        # A write that fails half-way leaves a torn line; the next one then starts on a line of its own.
        self._line_is_whole = False
        while rest:
            rest = rest[self._file.write(rest) :]
        self._line_is_whole = True

    def flush(self) -> None:
        """Wait until all lines are on the device, where a machine that loses its power keeps them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; to append after this is an error."""
        self._file.close()


class Line(NamedTuple):
    """One line of a file, as it is."""

    number: int
    """Counted from 1, as editors do."""
    record: dict[str, Any] | None
    """None: it is torn, or not a JSON object."""
    raw: bytes

    @property
    def is_ended(self) -> bool:
        """Whether it ends with a line break; only the last line of a file may not."""
        return self.raw.endswith(b"\n")


def read_lines(path: Path) -> Iterator[Line]:
    """Every line of a file in order, readable or not; empty ones are left out."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield Line(number, parse_line(raw), raw)


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """The record of a line; None: it is torn, or not a JSON object."""
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return True
        file.seek(-1, 2)
        return file.read() == b"\n"
