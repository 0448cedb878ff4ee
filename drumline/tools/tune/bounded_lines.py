"""The lines of a file or a pipe; of a long one only those of the beginning and the end, so that memory
is bounded."""

from __future__ import annotations

import io
import os
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
        file = self._file
        yield from _lines(file, HALF_BYTES)
        if not file.seekable():
            yield from self._last_lines(file)
            return
        begin = file.tell()
        end = file.seek(0, os.SEEK_END)
        self.is_partial = end - begin > HALF_BYTES
        file.seek(max(begin, end - HALF_BYTES))
        yield from _lines(file, HALF_BYTES)

    def _last_lines(self, pipe: BinaryIO) -> Iterable[bytes]:
        """A pipe is read to its end, or the program that writes would be stopped."""
        tail = bytearray()
        while part := pipe.read(PART_BYTES):
            tail += part
            if len(tail) > HALF_BYTES:
                self.is_partial = True
                del tail[:-HALF_BYTES]
        return _lines(io.BytesIO(tail), HALF_BYTES)


def _lines(file: BinaryIO, most: int) -> Iterable[bytes]:
    """Lines, or parts of lines without an end, of the next `most` bytes."""
    while most > 0 and (line := file.readline(min(MAX_LINE, most))):
        most -= len(line)
        yield line
