"""The manifest of a checkpoint: the size and checksum of every file, and a digest of itself.
Written last, read first.

Needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from drumline.base.errors import CheckpointError
from drumline.base.untrusted import from_json, parse_json, read_regular

FORMAT = 1
FILE_NAME = "manifest.json"
MAX_STEP_DIGITS = 18
MAX_NAME = 200
"""File systems allow 255 bytes, and a file that is being fetched has a longer name."""
NAME = re.compile(rf"(?!\.{{1,2}}$)[A-Za-z0-9._-]{{1,{MAX_NAME}}}")
"""A file name in a checkpoint, which cannot point outside the folder."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint folder differs from its manifest; `reason` names the file and what is wrong."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(
            f"the checkpoint {folder} is corrupt or incomplete: {reason}",
            next_step="use an earlier checkpoint, or restore this folder from a copy",
        )
        self.reason = reason


class FileRecord(msgspec.Struct, frozen=True, rename={"size": "bytes"}):
    """`bytes` is the name in the file."""

    size: int
    blake3: str


@dataclass(frozen=True)
class Manifest:
    step: int
    created: str
    metrics: Mapping[str, float]
    files: Mapping[str, FileRecord]
    non_finite: str | None = None
    """The first tensor that holds a NaN or an infinity, as FILE/NAME. None: all are finite, or an
    older version wrote it."""


def render(manifest: Manifest) -> bytes:
    content = {"format": FORMAT, **msgspec.to_builtins(manifest)}
    return _to_bytes({**content, "digest": _digest(content)})


def parse(raw: bytes) -> Manifest:
    """The manifest in these bytes; raises ValueError."""
    try:
        content = parse_json(raw)
    except ValueError as error:
        raise ValueError("unreadable") from error
    if not isinstance(content, dict):
        raise ValueError("unreadable")
    content.pop("digest", None)
    # The complete text is compared, not only the digest, so that a flipped bit in white space is
    # found.
    if raw != _to_bytes({**content, "digest": _digest(content)}):
        raise ValueError("its digest differs from its content")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"its format is {content.get('format')}, and this version of Drumline reads {FORMAT}"
        )
    # A valid digest does not prove valid types: anyone can compute one.
    manifest = from_json(Manifest, content)
    if not 0 <= manifest.step < 10**MAX_STEP_DIGITS:
        raise ValueError(f"its step is {manifest.step}")
    for name, record in manifest.files.items():
        _check_file_name(name)
        if record.size < 0:
            raise ValueError(f"the size of {name} is {record.size}")
    return manifest


def _check_file_name(name: str) -> None:
    if len(name) > MAX_NAME:
        raise ValueError(
            f"a file name has {len(name)} characters, and {MAX_NAME} at most are allowed"
        )
    if not NAME.fullmatch(name):
        raise ValueError(
            f"the file name {name!r} has characters other than letters, digits, '.', '_' and '-'"
        )


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked against its own digest."""
    with reading(folder, FILE_NAME):
        return parse(read_regular(folder / FILE_NAME))


@contextmanager
def reading(folder: Path, name: str) -> Iterator[None]:
    """Raise errors in this block as corruption of this file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(folder, f"{name} is missing") from error
    except OSError as error:
        raise CorruptCheckpointError(folder, f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CorruptCheckpointError(folder, f"{name}: {error}") from error


def _to_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=2).encode() + b"\n"


def _digest(content: Mapping[str, Any]) -> str:
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
