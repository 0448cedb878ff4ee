"""The files of a folder that are code, and what they hold: to be the same on every host.

`python -m drumline.launch.ssh.tree` reads such a list from stdin and says which files differ here; no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from drumline.terminal import show

# Never code, whatever a .gitignore says.
EXCLUDED = (
    *(".git", "runs", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"),
    *("*.pyc", ".DS_Store", "node_modules"),
)


def code_files(folder: Path, exclude: Sequence[str] = ()) -> list[str]:
    """Paths below the folder: what git would take if it is a repository, else all; less what is excluded."""
    patterns = [*EXCLUDED, *(pattern.rstrip("/") for pattern in exclude)]
    found = _of_git(folder)
    listed = found if found is not None else _walk(folder, patterns)
    return sorted({path for path in listed if not is_excluded(path, patterns) and _is_file(folder / path)})


def is_excluded(path: str, patterns: Iterable[str]) -> bool:
    """A pattern is the name of a file or folder at any depth, or a path from the top; `*` stands for anything."""
    whole = PurePosixPath(path)
    tops = [str(whole), *(str(parent) for parent in whole.parents)]
    return any(
        fnmatchcase(name, pattern) for pattern in patterns for name in (*whole.parts, *tops) if name != "."
    )


def digests(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """What each file holds, in short; a link holds where it leads. Files that are not there are left out."""
    return {path: digest for path in paths if (digest := _digest(folder / path)) is not None}


def tree_digest(files: Mapping[str, str]) -> str:
    """All of them in one word."""
    return hashlib.blake2b(json.dumps(sorted(files.items())).encode(), digest_size=16).hexdigest()


def _of_git(folder: Path) -> list[str] | None:
    # A repository may name commands for git to run; whoever copies it need not trust it.
    command = ["git", "-c", "core.fsmonitor=", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never"]
    command += ["ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _walk(folder: Path, patterns: Sequence[str]) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        here = PurePosixPath(place).relative_to(folder)
        folders[:] = [name for name in folders if not is_excluded(str(here / name), patterns)]
        yield from (str(here / name) for name in files)
        yield from (str(here / name) for name in folders if (folder / here / name).is_symlink())


def _is_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _digest(path: Path) -> str | None:
    try:
        data = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
    except OSError:
        return None
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def main() -> None:
    """Which of the files on stdin are missing or differ in the current folder."""
    wanted: dict[str, str] = json.load(sys.stdin)
    here = digests(Path(), wanted)
    show(json.dumps([path for path, digest in wanted.items() if here.get(path) != digest]))


if __name__ == "__main__":
    main()
