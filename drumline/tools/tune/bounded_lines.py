"""The lines of a file or a pipe; of a long one only those of the beginning and the end, so that memory
is bounded."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import BinaryIO

# Of a larger file or pipe only the beginning and the end are read: the connections, and the faults.
HALF_BYTES = 48 << 20
PART_BYTES = 1 << 20
MAX_LINE = 4096  # NCCL writes 1 kB at most


class BoundedLines:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.is_partial = False  # whether the middle was not read

    def __iter__(self) -> Iterator[bytes]:
        yield from _lines(self._file)
        # It is read to its end, or the program that writes into a pipe would be stopped.
        tail = bytearray()
        while part := self._file.read(PART_BYTES):
            tail += part
            if len(tail) > HALF_BYTES:
                self.is_partial = True
                del tail[:-HALF_BYTES]
        yield from _lines(io.BytesIO(tail))


def _lines(file: BinaryIO) -> Iterable[bytes]:
    """Lines, or parts of lines without an end, of the next bytes."""
    left = HALF_BYTES
    while left > 0 and (line := file.readline(min(MAX_LINE, left))):
        left -= len(line)
        yield line
