"""Hashes of a run's code and data, so that hosts can be compared and a difference can name the
file: `train.py differs`, `12 files instead of 13`.

Files are read in the same order on every host, and no more than a fixed number of them. A folder
that takes over a second has no hashes, and is `slow`."""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from drumline.base.untrusted import open_regular

UNREADABLE = -1
TIME_LIMIT_S = 1.0
CODE_ENDINGS = (".py", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".so", ".sh")
SETTINGS_ENDINGS = (".toml", ".yaml", ".yml", ".json", ".jsonnet", ".cfg", ".ini")
SKIPPED = {
    "__pycache__",
    "node_modules",
    "site-packages",
    "runs",
    "wandb",
    "mlruns",
    "lightning_logs",
}
MAX_CODE_FILES = 2_000
MAX_DATA_FILES = 20_000
MAX_CODE_BYTES = 1 << 20


class FileEntry(NamedTuple):
    """A file: its name below the folder, its path and its size; `UNREADABLE` for what cannot be
    read."""

    name: str
    path: str
    size: int


def code_facts(folder: Path, *, skip: Collection[Path] = ()) -> dict[str, Any]:
    """A short hash of each source and settings file, and one of them all:

    {'folder': '/job', 'files': {'train.py': '5d8e0c77'}, 'hash': 'a1b2c3d4e5f60718'}

    The first 2,000 files are read; of one over 1 MiB, the first MiB and the size are hashed."""
    skipped = {str(path.resolve()) for path in skip}
    endings = CODE_ENDINGS + SETTINGS_ENDINGS
    entries = files_below(folder, enters=lambda below: _is_code_folder(below, skipped))
    code = (entry for entry in entries if entry.name.endswith(endings))

    try:
        files = {entry.name: _code_hash(entry) for entry in _in_time(code, MAX_CODE_FILES)}
    except TimeoutError:
        return {"folder": str(folder), "slow": True}

    return {"folder": str(folder), "files": files, "hash": _hash(files)}


def data_facts(folder: Path) -> dict[str, Any]:
    """The number of files and bytes, and a hash of all names and sizes.

    A changed file of the same size is not found. `complete`: whether all files were
    counted."""
    entries = files_below(folder, enters=lambda below: not below.name.startswith("."))
    try:
        listed = list(_in_time(entries, MAX_DATA_FILES + 1))
    except TimeoutError:
        return {"folder": str(folder), "slow": True}

    files = listed[:MAX_DATA_FILES]
    return {
        "folder": str(folder),
        "files": len(files),
        "bytes": sum(max(0, entry.size) for entry in files),
        "complete": len(files) == len(listed),
        "hash": _hash({entry.name: entry.size for entry in files}),
    }


def _in_time(entries: Iterable[FileEntry], most: int) -> Iterator[FileEntry]:
    """The first ones; TimeoutError where reading them takes too long."""
    deadline = time.monotonic() + TIME_LIMIT_S
    for entry in itertools.islice(entries, most):
        if time.monotonic() > deadline:
            raise TimeoutError
        yield entry


def _hash(files: Mapping[str, object]) -> str:
    """Of the names and what is known of each, in their order."""
    text = "".join(f"{name}\0{value}\n" for name, value in files.items())
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def sort_key(name: str) -> list[str]:
    """Folder by folder, not letter by letter: what is in `a/` is before `a-b`."""
    return name.split("/")


def files_below(folder: Path, *, enters: Callable[[os.DirEntry[str]], bool]) -> Iterator[FileEntry]:
    """All files, sorted by `sort_key` of their names. Links are followed, and a loop of them is
    entered once. OSError where there is no such folder."""
    root = folder.stat()
    if folder.is_file():
        return iter([FileEntry(folder.name, str(folder), root.st_size)])

    entered = {(root.st_dev, root.st_ino)}

    def walk(path: str, prefix: str) -> Iterator[FileEntry]:
        """The files of a folder and of those below it; `prefix`: its own name, as in `models/`."""
        try:
            with os.scandir(path) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError:
            yield FileEntry(prefix or "/", path, UNREADABLE)
            return

        for entry in entries:
            name = f"{prefix}{entry.name}"
            try:
                is_folder = entry.is_dir()
                status = entry.stat()
            except OSError:  # a dangling link, or a file that was just deleted
                yield FileEntry(name, entry.path, UNREADABLE)
                continue

            identity = (status.st_dev, status.st_ino)
            if stat.S_ISREG(status.st_mode):  # opening a named pipe would block forever
                yield FileEntry(name, entry.path, status.st_size)
            elif is_folder and enters(entry) and identity not in entered:
                entered.add(identity)
                yield from walk(entry.path, f"{name}/")

    return walk(str(folder), "")


def _is_code_folder(folder: os.DirEntry[str], skipped: set[str]) -> bool:
    """Whether it is not hidden, not an environment, and not a folder of caches or runs."""
    if folder.name.startswith(".") or folder.name in SKIPPED or folder.name.endswith(".egg-info"):
        return False

    path = Path(folder.path)
    is_environment = (path / "pyvenv.cfg").exists()
    is_run = (path / "environment.json").exists() and (path / "events").is_dir()

    return not is_environment and not is_run and str(path.resolve()) not in skipped


def _code_hash(entry: FileEntry) -> str:
    """Of the first MiB and the size."""
    try:
        with open_regular(Path(entry.path), follow_links=True) as file:
            content = file.read(MAX_CODE_BYTES)
    except OSError:
        return "unread"

    size = entry.size.to_bytes(8, "little", signed=True)
    return hashlib.blake2b(content + size).hexdigest()[:8]
