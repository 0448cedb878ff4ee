"""The entries of a torch.profiler trace. A trace of some steps has a hundred MB: msgspec reads it
into few bytes an entry, and leaves arguments as they are until somebody asks for them.

A trace is a file of a run folder: it may be damaged, hostile or huge. It is read within limits.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from drumline.base.untrusted import DOCUMENT_BYTES, open_regular

MOST_BYTES = 1 << 30
"""Of a trace, unpacked."""
SMALL_BYTES = 1 << 20
MAX_RATIO = 64
"""How many times as large as its file a large trace may be, unpacked: those of torch.profiler are
10 to 20 times as large."""
BYTES_PER_VALUE = 12
"""Of a large trace, for each object and list in it, at least: those of torch.profiler have more
than 30. Empty ones take 30 times their bytes in memory."""
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


ENTRY = msgspec.json.Decoder(TraceEntry)


class Trace(msgspec.Struct):
    raw_entries: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    """The Unix time that all times are relative to."""

    def entries(self) -> Iterator[TraceEntry]:
        """One at a time, as all together take several times the memory; those of other types are
        left out."""
        for raw_entry in self.raw_entries:
            with suppress(msgspec.MsgspecError):
                yield ENTRY.decode(raw_entry)


def read_trace(path: Path) -> Trace:
    """Raises OSError for a file that cannot be read, ValueError for one that is no trace."""
    content = unpacked(path)
    num_values = content.count(b"{") + content.count(b"[")
    if num_values * BYTES_PER_VALUE > len(content) + SMALL_BYTES:
        raise ValueError(
            f"it has {num_values:,} objects and lists in {len(content):,} bytes, more than a trace"
        )
    trace: Trace = decoded(content, Trace)
    if not 0 <= trace.base_ns < 1 << 62:
        raise ValueError("its base time is no time")
    return trace


def decoded(content: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"it is no trace: {error}") from None


def unpacked(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a gzip file of at most so many bytes, and not many times as many as the file
    has."""
    parts = []
    size = 0
    try:
        with open_regular(path) as file, gzip.open(file) as packed:
            most = min(most, DOCUMENT_BYTES + MAX_RATIO * os.fstat(file.fileno()).st_size)
            while part := packed.read(SMALL_BYTES):
                parts.append(part)
                size += len(part)
                if size > most:
                    raise ValueError(f"it has more than {most:,} bytes")
    except EOFError:
        raise ValueError("it is incomplete") from None
    except zlib.error as error:
        raise ValueError(f"it is damaged: {error}") from None
    return b"".join(parts)
