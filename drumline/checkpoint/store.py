"""Writes checkpoints: into a hidden folder, flushed to the device, renamed when complete; and reads and removes them.

A checkpoint is a folder `ROOT/step-NNNNNNNN/` of safetensors and JSON files with a manifest. This module knows nothing
of training, only tensors and documents by file name. A file of tensors may be in parts, written by several processes.
Hidden folders beside it are unfinished work:

- `.step-N.partial`: being written, or left by a process that was killed while writing;
- `.step-N.replaced`: an earlier one of the same step, until its replacement is in place;
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

from drumline.checkpoint import catalog, disk, manifest, tensor_file
from drumline.checkpoint.manifest import FileRecord, Manifest
from drumline.errors import CheckpointError

_TENSORS = ".safetensors"
_PART = re.compile(r"-part-\d{5,}$")


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: tensors by file and documents by file, named without their ending."""

    tensors: dict[str, dict[str, Tensor]]
    documents: dict[str, Any]


class PartWriters(Protocol):
    """Processes that write parts of the same checkpoint (`parts`)."""

    def begin(self, partial: Path) -> None:
        """Called when the folder exists."""

    def collect(self, partial: Path) -> Mapping[str, FileRecord]:
        """Wait for their files; raises PartError."""

    def cancel(self) -> None:
        """Called when the save has failed."""


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
    others: PartWriters | None = None,
) -> Path:
    """Save a checkpoint. When this returns it is complete and on the device; until then earlier ones are kept.

    `non_finite`: the first tensor that is not finite, if any. `stream`: makes the bytes of a file of tensors.
    `others`: the other processes that write to the folder.
    """
    final = root / catalog.folder_name(step)
    contents = {file_name(name): stream(group) for name, group in tensors.items()}
    texts = {f"{name}{catalog.DOCUMENT}": _to_json(document) for name, document in documents.items()}
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
        record = Manifest(step, created, numbers, files, non_finite)
        disk.write_file(partial / manifest.FILE_NAME, [manifest.render(record)])
        disk.flush_folder(partial)
        _put_in_place(partial, final)
    except BaseException as error:
        if others is not None:
            others.cancel()
        with contextlib.suppress(OSError):
            disk.delete_folder(_hidden(final, "partial"))
        with contextlib.suppress(OSError):
            if not final.exists():
                _hidden(final, "replaced").rename(final)
        if isinstance(error, OSError):
            raise _not_saved(final, *disk.explain(error, folder=root, needed=needed)) from error
        if isinstance(error, PartError):
            raise _not_saved(final, error.reason, error.next_step) from error
        raise
    return final


def write_part(
    partial: Path, tensors: Mapping[str, Mapping[str, Tensor]], stream: Stream = tensor_file.stream
) -> dict[str, FileRecord]:
    """Write files of tensors into a checkpoint that another process makes, and flush them to the device."""
    named = {file_name(name): group for name, group in tensors.items()}
    files = {name: disk.write_file(partial / name, stream(group)) for name, group in named.items()}
    disk.flush_folder(partial)
    return files


def partial_folder(root: Path, step: int) -> Path:
    return _hidden(root / catalog.folder_name(step), "partial")


def file_name(name: str) -> str:
    return f"{name}{_TENSORS}"


def part_name(name: str, number: int) -> str:
    return f"{name}-part-{number:05d}"


def read(path: Path, *, device: str | torch.device = "cpu") -> Snapshot:
    """Read a complete checkpoint; verify it first."""
    names = manifest.read(path).files
    documents = [name.removesuffix(catalog.DOCUMENT) for name in names if name.endswith(catalog.DOCUMENT)]
    return Snapshot(
        tensors={name: read_tensors(path, name, device=device) for name in dict.fromkeys(_tensor_files(names))},
        documents={name: catalog.read_document(path, name) for name in documents},
    )


def read_tensors(path: Path, name: str, *, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensors of one file, in parts or not. On the CPU they are mapped from it: copy what is to be kept."""
    files = [file for file in manifest.read(path).files if name in _tensor_files([file])]
    parts = [tensor_file.read(path / file, device=device) for file in files]
    return {key: tensor for part in parts for key, tensor in part.items()}


def _tensor_files(files: Iterable[str]) -> Iterator[str]:
    """The names of the tensor files among these, without the number of a part."""
    return (_PART.sub("", file.removesuffix(_TENSORS)) for file in files if file.endswith(_TENSORS))


def remove(path: Path) -> None:
    """Delete a checkpoint; a kill in the middle leaves no incomplete one under a valid name."""
    hidden = _hidden(path, "removed")
    try:
        disk.delete_folder(hidden)
        path.rename(hidden)
        disk.delete_folder(hidden)
    except OSError as error:
        reason, next_step = disk.explain(error, folder=path.parent)
        what = f"the checkpoint {path} could not be removed: {reason}"
        raise CheckpointError(what, next_step=next_step) from error


def _fill(
    partial: Path, contents: Mapping[str, Iterable[bytes | memoryview]], others: PartWriters | None
) -> dict[str, FileRecord]:
    partial.mkdir()
    if others is not None:
        others.begin(partial)
    files: dict[str, FileRecord] = {name: disk.write_file(partial / name, chunks) for name, chunks in contents.items()}
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
    with contextlib.suppress(OSError):  # the next write deletes what is left of the old one
        disk.delete_folder(replaced)


def _tidy(root: Path) -> None:
    """Delete what a killed process left."""
    for path in catalog.folders(root):
        if not (name := catalog.HIDDEN_NAME.fullmatch(path.name)):
            continue
        if name[2] == "replaced" and not (root / name[1]).exists():
            path.rename(root / name[1])
        else:
            disk.delete_folder(path)


def _not_saved(final: Path, reason: str, next_step: str) -> CheckpointError:
    root = final.parent
    try:
        good = catalog.newest_valid(root).path
        earlier = f"the last good checkpoint, {good}, is untouched" if good else "there is no earlier checkpoint"
    except CheckpointError:
        earlier = "earlier checkpoints cannot be read"
    return CheckpointError(
        f"the checkpoint {final} could not be saved: {reason}; {earlier}",
        next_step=f"{next_step}, or use another run folder; then rerun the same command",
    )


def _hidden(final: Path, kind: str) -> Path:
    return final.parent / f".{final.name}.{kind}"


def _to_json(document: Any) -> bytes:
    # Not indented: that encoder is written in Python, and would hold the GIL for milliseconds beside the steps.
    return json.dumps(document).encode() + b"\n"
