"""How a checkpoint survives: written beside, flushed, renamed when whole; verified before it is used.

A checkpoint is a folder `ROOT/step-NNNNNNNN/` of safetensors and JSON files with a manifest. This module knows
nothing of training: it keeps tensors and documents by file name. A file of tensors may be in parts, that several
processes have written. Hidden names beside it are work in hand:

- `.step-N.partial`: being written, or left by a process that was killed while writing;
- `.step-N.replaced`: an earlier one of the same step, until its replacement stands;
- `.step-N.removed`: being deleted.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drumline.checkpoint import disk, look, manifest, tensor_file
from drumline.checkpoint.manifest import FileRecord, Manifest
from drumline.errors import CheckpointError

_TENSORS = ".safetensors"
_PART = re.compile(r"-part-\d{5,}$")


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: tensors by file and documents by file, named without their ending."""

    tensors: dict[str, dict[str, Tensor]]
    documents: dict[str, Any]


class Others(Protocol):
    """Processes that write parts of the same checkpoint (`parts`)."""

    def begin(self, partial: Path) -> None:
        """The folder is there to write to."""

    def collect(self, partial: Path) -> Mapping[str, FileRecord]:
        """Wait for their files; a PartError says which is not there, and why."""

    def give_up(self) -> None:
        """There will be no checkpoint."""


class PartError(Exception):
    """Another process could not write its part."""

    def __init__(self, reason: str, next_step: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.next_step = next_step


Stream = Callable[[Mapping[str, Tensor]], Iterable[bytes | memoryview]]


def write(
    root: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, Any],
    metrics: Mapping[str, float],
    non_finite: str | None = None,
    stream: Stream = tensor_file.stream,
    others: Others | None = None,
) -> Path:
    """Save a checkpoint. When this returns it is whole and on the device; until then earlier ones stand.

    `non_finite`: the first tensor that is not finite, if any. `stream`: how the bytes of a file of tensors are had.
    `others`: who else writes to the folder.
    """
    final = root / look.folder_name(step)
    contents = {f"{name}{_TENSORS}": stream(group) for name, group in tensors.items()}
    texts = {f"{name}{look.DOCUMENT}": _to_json(document) for name, document in documents.items()}
    needed = sum(map(tensor_file.num_bytes, tensors.values())) + sum(map(len, texts.values()))
    if manifest.FILE_NAME in texts:
        raise ValueError(f"the name {manifest.FILE_NAME} is taken")
    try:
        disk.make_folder(root)
        _tidy(root)
        partial = _hidden(final, "partial")
        files = _fill(partial, {**contents, **{name: [text] for name, text in texts.items()}}, others)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        numbers = {name: float(value) for name, value in metrics.items()}
        whole = Manifest(step, created, numbers, files, non_finite)
        disk.write_file(partial / manifest.FILE_NAME, [manifest.render(whole)])
        disk.flush_folder(partial)
        _put_in_place(partial, final)
    except BaseException as error:
        if others is not None:
            others.give_up()
        _undo(final)
        if isinstance(error, OSError):
            raise _not_saved(final, *disk.explain(error, folder=root, needed=needed)) from error
        if isinstance(error, PartError):
            raise _not_saved(final, error.reason, error.next_step) from error
        raise
    return final


def write_part(
    partial: Path, tensors: Mapping[str, Mapping[str, Tensor]], stream: Stream = tensor_file.stream
) -> dict[str, FileRecord]:
    """Write files of tensors into a checkpoint that another process makes; when this returns they are on the device."""
    files = {
        f"{name}{_TENSORS}": disk.write_file(partial / f"{name}{_TENSORS}", stream(group))
        for name, group in tensors.items()
    }
    disk.flush_folder(partial)
    return files


def partial_folder(root: Path, step: int) -> Path:
    """Where a checkpoint is while it is being written."""
    return _hidden(root / look.folder_name(step), "partial")


def file_name(name: str) -> str:
    """What a file of tensors is called on disk."""
    return f"{name}{_TENSORS}"


def part_name(name: str, number: int) -> str:
    """What a part of a file of tensors is called."""
    return f"{name}-part-{number:05d}"


def read(path: Path, *, device: str | torch.device = "cpu") -> Snapshot:
    """All that a checkpoint holds; verify it first."""
    names = manifest.read(path).files
    documents = [name.removesuffix(look.DOCUMENT) for name in names if name.endswith(look.DOCUMENT)]
    return Snapshot(
        tensors={name: read_tensors(path, name, device=device) for name in dict.fromkeys(_whole(names))},
        documents={name: look.read_document(path, name) for name in documents},
    )


def read_tensors(path: Path, name: str, *, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensors of one file, in parts or not. On the CPU they are mapped from it: copy what is to be kept."""
    files = [file for file in manifest.read(path).files if name in _whole([file])]
    parts = [tensor_file.read(path / file, device=device) for file in files]
    return {key: tensor for part in parts for key, tensor in part.items()}


def _whole(files: Iterable[str]) -> Iterator[str]:
    """What files of tensors are called that these are, or are parts of."""
    return (_PART.sub("", file.removesuffix(_TENSORS)) for file in files if file.endswith(_TENSORS))


def remove(path: Path) -> None:
    """Delete a checkpoint; killed in the middle of it, no half one is left under a valid name."""
    hidden = _hidden(path, "removed")
    try:
        disk.delete_folder(hidden)
        path.rename(hidden)
        disk.delete_folder(hidden)
    except OSError as error:
        reason, next_step = disk.explain(error, folder=path.parent)
        raise CheckpointError(
            f"the checkpoint {path} could not be removed: {reason}", next_step=next_step
        ) from error


def _fill(
    partial: Path, contents: Mapping[str, Iterable[bytes | memoryview]], others: Others | None
) -> dict[str, FileRecord]:
    partial.mkdir()
    if others is not None:
        others.begin(partial)
    files: dict[str, FileRecord] = {
        name: disk.write_file(partial / name, chunks) for name, chunks in contents.items()
    }
    if others is not None:
        files.update(others.collect(partial))
    return files


def _put_in_place(partial: Path, final: Path) -> None:
    # A folder cannot be renamed over another. Between the two renames the earlier one still counts:
    # `newest_valid` knows its hidden name.
    replaced = _hidden(final, "replaced")
    if final.is_dir():
        final.rename(replaced)
    partial.rename(final)
    disk.flush_folder(final.parent)
    with contextlib.suppress(OSError):  # the new one stands; what is left of the old goes at the next write
        disk.delete_folder(replaced)


def _tidy(root: Path) -> None:
    """Clear away what a killed process left."""
    for path in look.folders(root):
        if not (name := look.HIDDEN_NAME.fullmatch(path.name)):
            continue
        if name[2] == "replaced" and not (root / name[1]).exists():
            path.rename(root / name[1])
        else:
            disk.delete_folder(path)


def _undo(final: Path) -> None:
    with contextlib.suppress(OSError):
        disk.delete_folder(_hidden(final, "partial"))
    with contextlib.suppress(OSError):
        if not final.exists():
            _hidden(final, "replaced").rename(final)


def _not_saved(final: Path, reason: str, next_step: str) -> CheckpointError:
    root = final.parent
    try:
        good = look.newest_valid(root).path
        stands = (
            f"the last good checkpoint, {good}, is untouched" if good else "there is no earlier checkpoint"
        )
    except CheckpointError:
        stands = "earlier checkpoints cannot be looked at"
    return CheckpointError(
        f"the checkpoint {final} could not be saved: {reason}; {stands}",
        next_step=f"{next_step}, or use another run folder; then run the same command again",
    )


def _hidden(final: Path, kind: str) -> Path:
    return final.parent / f".{final.name}.{kind}"


def _to_json(document: Any) -> bytes:
    # Not indented: that is written in Python, and would hold its lock for milliseconds beside the steps.
    return json.dumps(document).encode() + b"\n"
