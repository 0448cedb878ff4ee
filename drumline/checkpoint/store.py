"""How a checkpoint survives: written beside, flushed, renamed when whole; verified before it is used.

A checkpoint is a folder `ROOT/step-NNNNNNNN/` of safetensors and JSON files with a manifest. This module knows
nothing of training: it keeps tensors and documents by file name. Hidden names beside it are work in hand:

- `.step-N.partial`: being written, or left by a process that was killed while writing;
- `.step-N.replaced`: an earlier one of the same step, until its replacement stands;
- `.step-N.removed`: being deleted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumline.checkpoint import disk, look, manifest, tensor_file
from drumline.checkpoint.manifest import FileRecord, Manifest
from drumline.errors import CheckpointError

_TENSORS = ".safetensors"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: tensors by file and documents by file, named without their ending."""

    tensors: dict[str, dict[str, Tensor]]
    documents: dict[str, Any]


def write(
    root: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Path:
    """Save a checkpoint. When this returns it is whole and on the device; until then earlier ones stand."""
    final = root / look.folder_name(step)
    contents = {f"{name}{_TENSORS}": tensor_file.stream(group) for name, group in tensors.items()}
    texts = {f"{name}{look.DOCUMENT}": _to_json(document) for name, document in documents.items()}
    needed = sum(map(tensor_file.file_size, tensors.values())) + sum(map(len, texts.values()))
    if manifest.FILE_NAME in texts:
        raise ValueError(f"the name {manifest.FILE_NAME} is taken")
    try:
        disk.make_folder(root)
        _tidy(root)
        partial = _hidden(final, "partial")
        _fill(partial, step, {**contents, **{name: [text] for name, text in texts.items()}}, metrics)
        _put_in_place(partial, final)
    except OSError as error:
        _undo(final)
        raise _not_saved(error, final, needed) from error
    except BaseException:
        _undo(final)
        raise
    return final


def read(path: Path, *, device: str | torch.device = "cpu") -> Snapshot:
    """All that a checkpoint holds; verify it first."""
    names = manifest.read(path).files
    return Snapshot(
        tensors={
            name.removesuffix(_TENSORS): read_tensors(path, name.removesuffix(_TENSORS), device=device)
            for name in names
            if name.endswith(_TENSORS)
        },
        documents={
            name.removesuffix(look.DOCUMENT): look.read_document(path, name.removesuffix(look.DOCUMENT))
            for name in names
            if name.endswith(look.DOCUMENT)
        },
    )


def read_tensors(path: Path, name: str, *, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensors of one file. On the CPU they are mapped from it: copy what is to be kept."""
    return tensor_file.read(path / f"{name}{_TENSORS}", device=device)


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
    partial: Path,
    step: int,
    contents: Mapping[str, Iterable[bytes | memoryview]],
    metrics: Mapping[str, float],
) -> None:
    partial.mkdir()
    files: dict[str, FileRecord] = {
        name: disk.write_file(partial / name, chunks) for name, chunks in contents.items()
    }
    created = datetime.now(UTC).isoformat(timespec="seconds")
    whole = Manifest(step, created, {name: float(value) for name, value in metrics.items()}, files)
    disk.write_file(partial / manifest.FILE_NAME, [manifest.render(whole)])
    disk.flush_folder(partial)


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


def _not_saved(error: OSError, final: Path, needed: int) -> CheckpointError:
    root = final.parent
    reason, next_step = disk.explain(error, folder=root, needed=needed)
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
    return json.dumps(document, indent=1).encode() + b"\n"
