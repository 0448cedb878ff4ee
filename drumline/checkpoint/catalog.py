"""Which checkpoints a folder holds and which of them are complete. Reads only, and needs no torch: `drumline verify`
uses it. `store` writes what is read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from drumline.checkpoint import disk, manifest
from drumline.checkpoint.manifest import CorruptCheckpointError, Manifest
from drumline.errors import CheckpointError
from drumline.untrusted import parse_json, read_regular, size_of

Result = TypeVar("Result")

STEP_NAME = re.compile(r"step-(\d{8,})")
HIDDEN_NAME = re.compile(r"\.(step-\d{8,})\.(partial|replaced|removed)")
DOCUMENT = ".json"
MAX_DOCUMENT_BYTES = 1 << 28
"""One of them holds the state of the datasets of all ranks."""


class Skipped(NamedTuple):
    path: Path
    reason: str


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint to resume from, and the newer ones that were skipped."""

    path: Path | None
    skipped: list[Skipped]


def verify(path: Path) -> Manifest:
    """Compare every byte of a checkpoint with its manifest."""
    found = check_sizes(path)
    for name, record in found.files.items():
        if _attempt(path, name, disk.checksum_of) != record.blake3:
            raise CorruptCheckpointError(path, f"{name}: its checksum differs from the manifest's")
    return found


def check_sizes(path: Path) -> Manifest:
    """The quick check: the manifest is intact, and every file is there in its right size."""
    found = manifest.read(path)
    named = STEP_NAME.fullmatch(path.name)
    if named and int(named[1]) != found.step:
        raise CorruptCheckpointError(path, f"{manifest.FILE_NAME} belongs to step {found.step}")
    for name, record in found.files.items():
        size = _attempt(path, name, size_of)
        if size != record.size:
            raise CorruptCheckpointError(path, f"{name} has {size} of {record.size} bytes")
    return found


def newest_valid(root: Path, check: Callable[[Path], None] | None = None) -> NewestCheckpoint:
    """The newest checkpoint that is complete, every byte checked, and finite; where none is finite, the newest complete
    one.

    `check` may raise CorruptCheckpointError to skip one."""
    candidates = []
    for path in folders(root):
        if named := STEP_NAME.fullmatch(path.name):
            candidates.append((int(named[1]), True, path))
        elif (hidden := HIDDEN_NAME.fullmatch(path.name)) and hidden[2] == "replaced":
            candidates.append((int(hidden[1].removeprefix("step-")), False, path))
    skipped: list[Skipped] = []
    fallback = NewestCheckpoint(None, skipped)
    for *_, path in sorted(candidates, reverse=True):
        try:
            found = verify(path)
            if check:
                check(path)
        except CorruptCheckpointError as error:
            skipped.append(Skipped(path, error.reason))
            continue
        if found.non_finite is None:
            return NewestCheckpoint(path, skipped)
        if fallback.path is None:
            fallback = NewestCheckpoint(path, list(skipped))
        skipped.append(Skipped(path, f"{found.non_finite} is not finite"))
    return fallback


def list_steps(root: Path) -> list[int]:
    """The steps that have a checkpoint folder, complete or not, in order."""
    names = (STEP_NAME.fullmatch(path.name) for path in folders(root))
    return sorted(int(name[1]) for name in names if name)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def is_step_folder(path: Path) -> bool:
    return STEP_NAME.fullmatch(path.name) is not None


def read_document(path: Path, name: str) -> Any:
    file = f"{name}{DOCUMENT}"
    try:
        return parse_json(_attempt(path, file, lambda found: read_regular(found, most=MAX_DOCUMENT_BYTES)))
    except ValueError as error:
        raise CorruptCheckpointError(path, f"{file} cannot be read: {error}") from error


def folders(root: Path) -> list[Path]:
    """The folders in a folder of checkpoints, hidden ones included."""
    try:
        return [path for path in root.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        reason, next_step = disk.explain(error, folder=root)
        raise CheckpointError(f"the checkpoints in {root} cannot be listed: {reason}", next_step=next_step) from error


def _attempt(folder: Path, name: str, operation: Callable[[Path], Result]) -> Result:
    try:
        return operation(folder / name)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(folder, f"{name} is missing") from error
    except OSError as error:
        raise CorruptCheckpointError(folder, f"{name} cannot be read: {error.strerror}") from error
