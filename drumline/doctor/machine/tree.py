"""All files below a folder, in an order that is the same on every host, so that two hosts can be compared even where
one of them had to stop early."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

UNREADABLE = -1


class Entry(NamedTuple):
    """A file: its name below the folder, where it is, and its size; a folder that may not be read has none."""

    name: str
    path: str
    size: int

    @property
    def name_bytes(self) -> bytes:
        return self.name.encode(errors="surrogateescape")


def files_below(folder: Path, *, enters: Callable[[os.DirEntry[str]], bool]) -> Iterator[Entry]:
    """In the order of `place_of` their names. Links are followed, a circle of them only once."""
    return _walk(str(folder), "", enters, {_identity(folder.stat())})


def place_of(name: str) -> list[str]:
    """What names are sorted by: folder by folder, not letter by letter."""
    return name.split("/")


def _walk(
    folder: str, prefix: str, enters: Callable[[os.DirEntry[str]], bool], seen: set[tuple[int, int]]
) -> Iterator[Entry]:
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        yield Entry(prefix or "/", folder, UNREADABLE)
        return
    for entry in entries:
        name = f"{prefix}{entry.name}"
        try:
            is_folder, status = entry.is_dir(), entry.stat()
        except OSError:  # a link that leads nowhere, or a file that has just gone
            yield Entry(name, entry.path, UNREADABLE)
            continue
        if stat.S_ISREG(status.st_mode):  # to open a named pipe would wait for ever
            yield Entry(name, entry.path, status.st_size)
        elif is_folder and enters(entry) and (identity := _identity(status)) not in seen:
            seen.add(identity)
            yield from _walk(entry.path, f"{name}/", enters, seen)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
