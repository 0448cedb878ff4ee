"""Which checkpoints a folder holds and which of them are complete; and storage errors in words.

It only reads, and needs no torch: `drumline verify` uses it. `store` writes checkpoints.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from drumline.base.errors import CheckpointError
from drumline.base.text import file_size
from drumline.base.untrusted import DOCUMENT_BYTES, descriptor_of, parse_json, read_regular, size_of
from drumline.runs import manifest
from drumline.runs.manifest import CorruptCheckpointError, Manifest

_DIGITS = f"[0-9]{{8,{manifest.MAX_STEP_DIGITS}}}"
STEP_NAME = re.compile(f"step-({_DIGITS})")
HIDDEN_NAME = re.compile(rf"\.(step-{_DIGITS})\.(partial|replaced|removed)")
DOCUMENT = ".json"
MAX_DOCUMENT_BYTES = 1 << 28
"""A file with the state of the datasets of all ranks, or of an object of the user's."""
SMALL_DOCUMENTS = frozenset({"progress", "model"})
"""Those whose size depends neither on the number of ranks, of samples, nor of tensors."""
_READ_BYTES = 1 << 20
_PERMISSION = ("no permission", "let user id {user} read and write {folder}")
_IN_THE_WAY = ("a file is where a folder should be", "move away {file}")
_REASONS = {
    errno.ENOSPC: (
        "the disk is full",
        "free some space on the disk of {folder}, or inodes (df -i)",
    ),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or ask for a larger quota"),
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: ("the file system is read-only", "mount the disk of {folder} for writing"),
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
}


class Skipped(NamedTuple):
    path: Path
    reason: str


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint to resume from, and the newer ones that were skipped."""

    path: Path | None
    skipped: list[Skipped]


def verify(path: Path) -> Manifest:
    """Compare every byte of a checkpoint with its manifest."""
    checked = check_sizes(path)
    for name, record in checked.files.items():
        with manifest.reading(path, name):
            checksum = checksum_of(path / name)
        if checksum != record.blake3:
            raise CorruptCheckpointError(path, f"{name}: its checksum differs from the manifest's")
    return checked


def check_sizes(path: Path) -> Manifest:
    """The quick check: the manifest is intact, and every file exists and has its size."""
    content = manifest.read(path)
    folder = STEP_NAME.fullmatch(path.name)
    if folder and int(folder[1]) != content.step:
        raise CorruptCheckpointError(path, f"{manifest.FILE_NAME} belongs to step {content.step}")
    for name, record in content.files.items():
        with manifest.reading(path, name):
            size = size_of(path / name)
        if size != record.size:
            raise CorruptCheckpointError(path, f"{name} has {size} of {record.size} bytes")
    return content


def newest_valid(root: Path, check: Callable[[Path], None] | None = None) -> NewestCheckpoint:
    """The newest checkpoint that is complete, with every byte checked, and finite; if none is
    finite, the newest complete one.

    `check` may raise CorruptCheckpointError to skip one."""
    skipped: list[Skipped] = []
    fallback = NewestCheckpoint(None, skipped)
    for path in _newest_first(root):
        try:
            checked = verify(path)
            if check:
                check(path)
        except CorruptCheckpointError as error:
            skipped.append(Skipped(path, error.reason))
            continue
        if checked.non_finite is None:
            return NewestCheckpoint(path, skipped)
        if fallback.path is None:
            fallback = NewestCheckpoint(path, list(skipped))
        skipped.append(Skipped(path, f"{checked.non_finite} is not finite"))
    return fallback


def _newest_first(root: Path) -> list[Path]:
    """The checkpoint folders; one that was being replaced by another of its step comes after it."""
    order: dict[Path, tuple[int, bool]] = {}
    for path in folders(root):
        folder = STEP_NAME.fullmatch(path.name)
        hidden = HIDDEN_NAME.fullmatch(path.name)
        if folder:
            order[path] = (int(folder[1]), True)
        elif hidden and hidden[2] == "replaced":
            order[path] = (int(hidden[1].removeprefix("step-")), False)
    return sorted(order, key=lambda path: (*order[path], path), reverse=True)


def list_steps(root: Path) -> list[int]:
    """The steps that have a checkpoint folder, complete or not, in order."""
    names = (STEP_NAME.fullmatch(path.name) for path in folders(root))
    return sorted(int(name[1]) for name in names if name)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def read_document(path: Path, name: str) -> Any:
    file = f"{name}{DOCUMENT}"
    with manifest.reading(path, file):
        return parse_json(read_regular(path / file, most=document_limit(name)))


def document_limit(name: str) -> int:
    """How many bytes the document of this name may have."""
    return DOCUMENT_BYTES if name in SMALL_DOCUMENTS else MAX_DOCUMENT_BYTES


def folders(root: Path) -> list[Path]:
    """The folders in a folder of checkpoints, including hidden ones."""
    try:
        return [path for path in root.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        reason, next_step = explain_os_error(error, folder=root)
        raise CheckpointError(
            f"the checkpoints in {root} cannot be listed: {reason}", next_step=next_step
        ) from error


def checksum_of(path: Path) -> str:
    """The checksum of a file. It is read, not mapped, so that a bad disk causes an error and not
    SIGBUS."""
    checksum = blake3()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with os.fdopen(descriptor_of(path, os.O_RDONLY), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum.update(view[:count])
    return checksum.hexdigest()


def explain_os_error(error: OSError, *, folder: Path, needed: int | None = None) -> tuple[str, str]:
    """The reason of an OSError in a folder, and what to do next."""
    reason = error.strerror or str(error)
    next_step = "check the disk of {folder}, and that no other run uses it"
    reason, next_step = _REASONS.get(error.errno or 0, (reason, next_step))
    if needed is not None:
        with suppress(OSError):
            reason += f" ({file_size(needed)} needed, {file_size(_free_bytes(folder))} free)"
    return reason, next_step.format(
        folder=folder,
        file=error.filename2 or error.filename,
        user=os.geteuid(),
    )


def _free_bytes(folder: Path) -> int:
    """On the disk of this folder, which may not exist yet."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    return shutil.disk_usage(nearest).free
