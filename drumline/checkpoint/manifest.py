"""The manifest: what a checkpoint folder must hold, byte for byte. Written last, read first.

It lists the size and checksum of every file, and a digest of itself, so that a folder proves that it is whole.
No torch here: a tool that only lists checkpoints can read manifests alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from drumline.errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"


class TornCheckpointError(CheckpointError):
    """A checkpoint folder is not what its manifest says; `reason` names the file and what is wrong."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(
            f"the checkpoint {folder} is torn: {reason}",
            next_step="use an earlier checkpoint, or restore this folder from a copy",
        )
        self.reason = reason


@dataclass(frozen=True)
class FileRecord:
    """What one file must be."""

    size: int
    blake3: str


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint holds."""

    step: int
    created: str
    metrics: Mapping[str, float]
    files: Mapping[str, FileRecord]
    non_finite: str | None = None
    """The first tensor that holds a NaN or an infinity, as FILE/NAME. None: all are finite, or an older version wrote
    it."""


def render(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "created": manifest.created,
        "metrics": dict(manifest.metrics),
        "non_finite": manifest.non_finite,
        "files": {
            name: {"bytes": record.size, "blake3": record.blake3} for name, record in manifest.files.items()
        },
    }
    return _to_bytes({**content, "digest": _digest(content)})


def parse(raw: bytes) -> Manifest:
    """The manifest in these bytes; a ValueError says what is wrong with them."""
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise ValueError("unreadable") from error
    if not isinstance(content, dict):
        raise ValueError("unreadable")
    content.pop("digest", None)
    # Not only the digest is compared but the whole text: a flipped bit in white space is damage too.
    if raw != _to_bytes({**content, "digest": _digest(content)}):
        raise ValueError("its digest differs from its content")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"its format is {content.get('format')}, and this version of Drumline reads {FORMAT}"
        )
    files = {name: FileRecord(entry["bytes"], entry["blake3"]) for name, entry in content["files"].items()}
    return Manifest(content["step"], content["created"], content["metrics"], files, content.get("non_finite"))


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked against its own digest."""
    try:
        return parse((folder / FILE_NAME).read_bytes())
    except FileNotFoundError as error:
        raise TornCheckpointError(folder, f"{FILE_NAME} is missing") from error
    except OSError as error:
        raise TornCheckpointError(folder, f"{FILE_NAME} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TornCheckpointError(folder, f"{FILE_NAME}: {error}") from error


def _to_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=2).encode() + b"\n"


def _digest(content: Mapping[str, Any]) -> str:
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
