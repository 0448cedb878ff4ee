"""What the code of a run is: a hash of each file, so that a difference between hosts can name the file."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from drumline.doctor.machine.tree import files_below
from drumline.untrusted import open_regular

SOURCE = (".py", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".so", ".sh")
SETTINGS = (".toml", ".yaml", ".yml", ".json", ".jsonnet", ".cfg", ".ini")
ENDINGS = SOURCE + SETTINGS
NOT_ENTERED = {"__pycache__", "node_modules", "site-packages", "runs", "wandb", "mlruns", "lightning_logs"}
MAX_FILES = 2_000
MAX_BYTES = 1 << 20
TIME_LIMIT_S = 1.0
SHORT = 8


def code_facts(folder: Path, *, skip: Collection[Path] = ()) -> dict[str, Any]:
    """`files` by name with a short hash, and the `hash` of them all. Of a file over 1 MiB the first MiB and the size
    count. `until` is where it stopped, after 2,000 files or a second; None: nowhere."""
    if not folder.is_dir():
        return {"folder": str(folder), "missing": True}
    left_out = {str(path.resolve()) for path in skip}
    files: dict[str, str] = {}
    until = None
    deadline = time.monotonic() + TIME_LIMIT_S
    for entry in files_below(folder, enters=lambda below: _is_code(below, left_out)):
        if not entry.name.endswith(ENDINGS):
            continue
        if len(files) == MAX_FILES or time.monotonic() > deadline:
            until = entry.name
            break
        files[entry.name] = _hash_of(entry.path, entry.size)
    return {
        "folder": str(folder),
        "missing": False,
        "files": files,
        "until": until,
        "hash": hash_of_files(files),
    }


def hash_of_files(files: dict[str, str]) -> str:
    """One for all, names included."""
    digest = hashlib.blake2b(digest_size=8)
    for name, short in files.items():
        digest.update(f"{name}\0{short}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _is_code(folder: os.DirEntry[str], left_out: set[str]) -> bool:
    """Not what tools and runs leave beside it."""
    if folder.name.startswith(".") or folder.name in NOT_ENTERED or folder.name.endswith(".egg-info"):
        return False
    path = Path(folder.path)
    is_environment = (path / "pyvenv.cfg").exists()
    is_run = (path / "environment.json").exists() and (path / "events").is_dir()
    return not is_environment and not is_run and str(path.resolve()) not in left_out


def _hash_of(path: str, size: int) -> str:
    try:
        with open_regular(Path(path), follow_links=True) as file:
            content = file.read(MAX_BYTES)
    except OSError:
        return "unread"
    return hashlib.blake2b(content + size.to_bytes(8, "little", signed=True)).hexdigest()[:SHORT]
