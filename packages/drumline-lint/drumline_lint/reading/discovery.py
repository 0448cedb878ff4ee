"""Finds the files to read: those given by name, and those in folders."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from drumline_lint.errors import UsageError
from drumline_lint.findings import UNREADABLE, Finding, problem

SUFFIXES = (".py", ".ipynb", ".sh", ".bash", ".sbatch", ".slurm", ".yaml", ".yml")
DOCKERFILE_NAMES = re.compile(
    r"(?:Docker|Container)file(?:\..+)?|.+\.(?:docker|container)file", re.IGNORECASE
)
SHELL_SHEBANG = re.compile(rb"#!.*\b(?:ba|da|k|z)?sh\b")
_FIRST_LINE_BYTES = 200
SKIPPED = frozenset({"__pycache__", "node_modules", "build", "site-packages", "venv"})


@dataclass
class Found:
    """The result of a search."""

    files: list[Path]
    problems: list[Finding]
    """Folders that could not be listed."""
    outside: frozenset[Path] = frozenset()
    """The files outside of the given folders, found through a link. They are read, but not
    written."""


@dataclass
class _Search:
    exclude: Sequence[str]
    root: Path
    by_real_path: dict[str, Path] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    linked_folders: list[Path] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)


def find_files(
    paths: Sequence[Path], *, exclude: Sequence[str] = (), root: Path | None = None
) -> Found:
    """Sorted, without duplicates. `exclude`: globs of names, or of paths relative to `root`."""
    if missing := [str(path) for path in paths if not os.path.lexists(path)]:
        raise UsageError(
            f"there is no {', no '.join(missing)}", next_step="give files or folders that exist"
        )
    search = _Search(exclude, root or Path.cwd())
    for path in paths:
        if _is(path.is_dir):
            _walk(search, path)
        else:
            search.by_real_path.setdefault(os.path.realpath(path), path)
    # Last, so that a file has its own path rather than a link's.
    while search.linked_folders:
        _walk(search, search.linked_folders.pop(0))
    tops = [os.path.join(os.path.realpath(path), "") for path in paths]  # noqa: PTH118
    outside = {
        path
        for real, path in search.by_real_path.items()
        if path not in paths and not real.startswith(tuple(tops))
    }
    return Found(sorted(search.by_real_path.values()), search.problems, frozenset(outside))


def is_matched(path: Path, globs: Sequence[str], root: Path) -> bool:
    """By its name, or by its path below the root. A `*` matches slashes too."""
    if not globs:
        return False
    below = os.path.relpath(path, root).replace(os.sep, "/")
    return any(
        fnmatch(path.name, glob.rstrip("/")) or fnmatch(below, glob.removeprefix("./").rstrip("/"))
        for glob in globs
    )


def _walk(search: _Search, top: Path) -> None:
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        real = os.path.realpath(folder)
        if real in search.folders:
            continue
        search.folders.add(real)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            unreadable = problem(
                UNREADABLE, folder, f"the folder cannot be listed: {error.strerror}"
            )
            search.problems.append(unreadable)
            continue
        waiting += [
            inner for entry in entries if (inner := _take(search, folder, real, entry)) is not None
        ]


def _take(search: _Search, folder: Path, real: str, entry: os.DirEntry[str]) -> Path | None:
    """Keep a file; a folder to walk into is returned, unless a link leads there."""
    path = folder / entry.name
    if _is(entry.is_dir):
        is_skipped = (
            path.name.startswith(".") or path.name in SKIPPED or _is((path / "pyvenv.cfg").exists)
        )
        if is_skipped or is_matched(path, search.exclude, search.root):
            return None
        if not entry.is_symlink():
            return path
        search.linked_folders.append(path)
    elif (
        (
            entry.name.endswith(SUFFIXES)
            or DOCKERFILE_NAMES.fullmatch(entry.name)
            or _is_shell(entry)
        )
        and _is(entry.is_file)
        and not is_matched(path, search.exclude, search.root)
    ):
        whole = os.path.realpath(path) if entry.is_symlink() else os.path.join(real, entry.name)  # noqa: PTH118
        search.by_real_path.setdefault(whole, path)
    return None


def _is_shell(entry: os.DirEntry[str]) -> bool:
    """A program without an ending whose first line names a shell. Only these are opened."""
    if "." in entry.name or not _is(entry.is_file):
        return False
    try:
        with open(entry.path, "rb") as file:  # noqa: PTH123
            return SHELL_SHEBANG.match(file.read(_FIRST_LINE_BYTES)) is not None
    except OSError:
        return False


def _is(question: Callable[[], bool]) -> bool:
    """False for a link to itself, or a folder without permission."""
    try:
        return question()
    except OSError:
        return False
