"""The entries of a torch.profiler trace. A trace of some steps has a hundred MB: it is unpacked and
decoded in parts, and arguments stay as they are until somebody asks for them.

A trace is a file of a run folder: it may be damaged, hostile or huge. It is read within limits.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from drumline.base.untrusted import DOCUMENT_BYTES, open_regular

MOST_BYTES = 1 << 30
"""Of a trace, unpacked."""
PART_BYTES = 1 << 17
"""What is decoded at once: its entries fit into a core's cache."""
SMALL_BYTES = 1 << 20
MAX_RATIO = 64
"""How many times as large as its file a large trace may be, unpacked: those of torch.profiler are
10 to 20 times as large."""
BYTES_PER_VALUE = 12
"""Of what is decoded in one part, for each object and list in it, at least: traces of torch.profiler
have more than 30. Empty ones take 30 times their bytes in memory."""
NO_ARGUMENTS = msgspec.Raw(b"{}")


class TraceEntry(msgspec.Struct, gc=False, omit_defaults=True):
    """One entry, by the trace event format; times are in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: float | None = None
    dur: float | None = None
    id: int | str | None = None
    s: str | None = None
    bp: str | None = None
    args: msgspec.Raw = NO_ARGUMENTS


class Document(msgspec.Struct):
    raw_entries: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)


class EntryDocument(msgspec.Struct):
    entries: list[TraceEntry] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)


ENTRY = msgspec.json.Decoder(TraceEntry)
DOCUMENT = msgspec.json.Decoder(EntryDocument)
OPENING = b'{"traceEvents": ['
CLOSING = b"]}"
BETWEEN = b"\n  },\n  {"
"""Between two entries, as torch writes them: no text in JSON has a line break. A trace that somebody
else wrote in another way is decoded in one part."""


class TraceReader:
    """Reads a trace. Raises OSError for a file that cannot be read, ValueError for one that is no
    trace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.base_ns = 0
        """The Unix time that all times are relative to: torch writes it before the entries."""

    def parts(self) -> Iterator[list[TraceEntry]]:
        """The entries, in parts; those of other types are left out."""
        return map(self._entries_of, self._documents())

    def _documents(self) -> Iterator[bytes]:
        """The trace as documents with some of its entries each."""
        opening = b""
        begun: list[bytes] = []
        size = 0
        num_values = 0
        for part in unpacked(self._path):
            end = part.rfind(BETWEEN)
            if end < 0:
                begun.append(part)
                size += len(part)
                num_values += part.count(b"{") + part.count(b"[")
                check_values(num_values, size)
                continue
            last = end + len(b"\n  }")
            yield b"".join([opening, *begun, part[:last], CLOSING])
            opening = OPENING
            begun = [part[last + len(b",") :]]
            size = 0
            num_values = 0
        yield b"".join([opening, *begun])

    def _entries_of(self, content: bytes) -> list[TraceEntry]:
        try:
            document = DOCUMENT.decode(content)
            entries = document.entries
            base_ns = document.base_ns
        except (msgspec.MsgspecError, RecursionError):
            raw_document: Document = decoded(content, Document)
            entries = list(decodable(raw_document.raw_entries))
            base_ns = raw_document.base_ns
        if not 0 <= base_ns < 1 << 62:
            raise ValueError("its base time is no time")
        self.base_ns = base_ns or self.base_ns
        return entries


def check_values(num_values: int, size: int) -> None:
    """Refuses a part of a trace that would be many times as large in memory."""
    if num_values * BYTES_PER_VALUE > size + SMALL_BYTES:
        raise ValueError(
            f"it has {num_values:,} objects and lists in {size:,} bytes, more than a trace"
        )


def decodable(raw_entries: Iterable[msgspec.Raw]) -> Iterator[TraceEntry]:
    for raw_entry in raw_entries:
        with suppress(msgspec.MsgspecError):
            yield ENTRY.decode(raw_entry)


def decoded(content: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"it is no trace: {error}") from None


def unpacked(path: Path, most: int = MOST_BYTES) -> Iterator[bytes]:
    """The content of a gzip file of at most so many bytes, not many times as many as the file
    has."""
    size = 0
    try:
        with open_regular(path) as file, gzip.open(file) as packed:
            most = min(most, DOCUMENT_BYTES + MAX_RATIO * os.fstat(file.fileno()).st_size)
            while part := packed.read(PART_BYTES):
                size += len(part)
                if size > most:
                    raise ValueError(f"it has more than {most:,} bytes")
                yield part
    except EOFError:
        raise ValueError("it is incomplete") from None
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from None
