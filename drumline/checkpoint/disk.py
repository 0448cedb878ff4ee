"""Writes files with their checksums, flushed to the device; makes and deletes folders; explains OSErrors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from drumline.checkpoint.manifest import FileRecord
from drumline.text import file_size
from drumline.untrusted import descriptor_of

# Large enough that a thread which hashes or writes seldom needs the GIL, which the training thread has.
_PIECE_BYTES = 8 << 20
_READ_BYTES = _WORTH_A_THREAD = 1 << 20


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and wait until it is on the device; its size and checksum come from the same pass."""
    # A second thread hashes what is being written. blake3's own default pool of threads does not survive a fork, so a
    # forked process that hashes would hang; this one lasts as long as the file. It has a few threads on many cores.
    checksum, size = blake3(max_threads=max(1, min(4, len(os.sched_getaffinity(0)) // 4))), 0
    with path.open("xb") as file, ThreadPoolExecutor(1, "drumline-checksum") as beside:
        for chunk in chunks:
            for start in range(0, len(chunk), _PIECE_BYTES):
                piece = chunk[start : start + _PIECE_BYTES]
                if len(piece) < _WORTH_A_THREAD:
                    checksum.update(piece)
                    file.write(piece)
                else:
                    hashed = beside.submit(checksum.update, piece)
                    file.write(piece)
                    hashed.result()
                size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, checksum.hexdigest())


def checksum_of(path: Path) -> str:
    """The checksum of a file; read rather than mapped, so that a bad disk is an error and not a signal."""
    checksum, buffer = blake3(), bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with os.fdopen(descriptor_of(path, os.O_RDONLY), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum.update(view[:count])
    return checksum.hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and wait until their names are on the device."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush_folder(folder.parent)


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the device."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)


def delete_folder(folder: Path) -> None:
    """Delete a folder if it exists; of a link only the link."""
    if folder.is_symlink():
        folder.unlink()
        return
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def explain(error: OSError, *, folder: Path, needed: int | None = None) -> tuple[str, str]:
    """The reason of an OSError in a folder, and what to do next."""
    free = _free(folder)
    room = "" if needed is None or free is None else f" ({file_size(needed)} needed, {file_size(free)} free)"
    make_room = (
        f"delete some files on the disk of {folder}: it has bytes left but may have no inodes (see df -i)"
        if (free or 0) > (needed or 0)
        else f"free some space on the disk of {folder}"
    )
    permission = ("no permission", f"let user id {os.geteuid()} read and write {folder}")
    in_the_way = ("a file is where a folder should be", f"move away {error.filename2 or error.filename}")
    reasons = {
        errno.ENOSPC: ("the disk is full", make_room),
        errno.EDQUOT: ("the disk quota is used up", "free some space, or ask for a larger quota"),
        errno.EACCES: permission,
        errno.EPERM: permission,
        errno.EROFS: ("the file system is read-only", f"mount the disk of {folder} for writing"),
        errno.EEXIST: in_the_way,
        errno.ENOTDIR: in_the_way,
    }
    unknown = (error.strerror or str(error), f"check the disk of {folder}, and that no other run uses it")
    reason, next_step = reasons.get(error.errno or 0, unknown)
    return reason + room, next_step


def _free(folder: Path) -> int | None:
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    try:
        return shutil.disk_usage(nearest).free
    except OSError:
        return None
