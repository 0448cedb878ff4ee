"""What a dataset on disk is, without reading it all: how many files and bytes, a hash of all names and sizes, and the
content of a few files. Two hosts with the same answer have the same data, unless someone changed bytes in
the middle of a file and kept its size."""

from __future__ import annotations

import hashlib
import heapq
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drumline.doctor.machine.tree import Entry, files_below
from drumline.untrusted import open_regular

NUM_SAMPLES = 16
PIECE_BYTES = 64 << 10
TIME_LIMIT_S = 1.0


def data_facts(folder: Path) -> dict[str, Any]:
    """Of a folder, or of one file. A tree that takes longer than a second is looked at in part, in an order that is the
    same everywhere; `marks` are the hashes after 1, 2, 4, ... files, up to which two such looks can be compared."""
    if not folder.exists():
        return {"folder": str(folder), "missing": True}
    entries = _entries(folder)
    digest = hashlib.blake2b(digest_size=8)
    marks: dict[str, str] = {}
    chosen: list[tuple[int, str, Entry]] = []
    files, size, complete = 0, 0, True
    deadline = time.monotonic() + TIME_LIMIT_S
    for entry in entries:
        if time.monotonic() > deadline:
            complete = False
            break
        files, size = files + 1, size + max(0, entry.size)
        digest.update(b"%s\0%d\n" % (entry.name_bytes, entry.size))
        _keep(chosen, entry)
        if files & (files - 1) == 0:
            marks[str(files)] = digest.hexdigest()
    return {
        "folder": str(folder),
        "missing": False,
        "files": files,
        "bytes": size,
        "complete": complete,
        "hash": digest.hexdigest(),
        "marks": marks,
        "samples": {
            entry.name: _content_hash(entry) for _, _, entry in sorted(chosen, key=lambda one: one[1])
        },
    }


def _entries(folder: Path) -> Iterator[Entry]:
    if folder.is_file():
        return iter([Entry(folder.name, str(folder), folder.stat().st_size)])
    return files_below(folder, enters=lambda below: not below.name.startswith("."))


def _keep(chosen: list[tuple[int, str, Entry]], entry: Entry) -> None:
    """The files whose names have the largest checksums: which ones depends on nothing but the names, so a host that
    lacks a file has nearly the same sample."""
    key = (zlib.crc32(entry.name_bytes), entry.name, entry)
    if len(chosen) < NUM_SAMPLES:
        heapq.heappush(chosen, key)
    else:
        heapq.heappushpop(chosen, key)


def _content_hash(entry: Entry) -> str:
    """Of its beginning, its middle and its end."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        with open_regular(Path(entry.path), follow_links=True) as file:
            for start in (0, (entry.size - PIECE_BYTES) // 2, entry.size - PIECE_BYTES):
                file.seek(max(0, start))
                digest.update(file.read(PIECE_BYTES))
    except OSError:
        return "unread"
    return digest.hexdigest()
