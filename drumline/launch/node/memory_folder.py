"""Folders in memory that go with a job; where its watch is kept.

Who made one removes it. A job that was killed as a whole leaves nobody to do so: then the next job of the same user
does. That one is in use is known by a lock on a file in it, which the kernel drops with the last who held it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")  # noqa: S108 (mkdtemp makes a folder of our own in it)
PREFIX = "drumline-watch-"
IN_USE = "in-use"
ROOM_BYTES = 4 << 20
"""For beats, stacks and flight recorders of a node. Containers often get little, and data loaders fill it."""


def make_memory_folder(job: str = "") -> Path:
    """Of this user alone; in memory where that can be written, else in the temporary folder. OSError: in neither."""
    folder = _make(f"{PREFIX}{job}-" if job else PREFIX)
    _sweep(folder.parent)
    return folder


def _make(prefix: str) -> Path:
    with contextlib.suppress(OSError):
        if _room_bytes(MEMORY) >= ROOM_BYTES:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=MEMORY))
    return Path(tempfile.mkdtemp(prefix=prefix))


def _room_bytes(place: Path) -> int:
    room = os.statvfs(place)
    return room.f_bavail * room.f_frsize


def hold(folder: Path) -> int:
    """From now on it is in use, until the descriptor is closed here and in all that was forked since."""
    try:
        descriptor = os.open(folder / IN_USE, os.O_RDONLY)
    except FileNotFoundError:
        return _hold_first(folder)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _hold_first(folder: Path) -> int:
    """The file has its lock before it has its name: in between, it would look like one that was left."""
    nameless = folder / f".{IN_USE}"
    descriptor = os.open(nameless, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    nameless.rename(folder / IN_USE)
    return descriptor


def _sweep(place: Path) -> None:
    """Take away what jobs of this user have left."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
