"""Finds the files to read: those given by name, and those in folders."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from drumline_lint.errors import UsageError
from drumline_lint.findings import UNREADABLE, Finding, problem

SUFFIXES = (".py", ".ipynb", ".sh", ".bash", ".sbatch", ".slurm", ".yaml", ".yml")
DOCKERFILE_NAMES = re.compile(
    r"(?:Docker|Container)file(?:\..+)?|.+\.(?:docker|container)file", re.IGNORECASE
)
DOCUMENT_NAMES = re.compile(
    r"requir\w*ments?[\w.-]*\.txt|pyproject\.toml|(?:ds|deepspeed|zero)[\w.-]*\.json", re.IGNORECASE
)
"""Requirements, and the settings of DeepSpeed."""
README_NAMES = re.compile(r"README.*|.+\.(?:md|rst)", re.IGNORECASE)
"""READMEs, and documentation beside them."""
SHELL_SHEBANG = re.compile(rb"#!.*\b(?:ba|da|k|z)?sh\b")
_FIRST_LINE_BYTES = 200
SKIPPED = frozenset({"__pycache__", "node_modules", "build", "site-packages", "venv"})


@dataclass
class Discovery:
    """The result of a search."""

    files: list[Path]
    problems: list[Finding]
    """Folders that could not be listed."""
    outside: frozenset[Path] = frozenset()
    """The files outside of the given folders, found through a link. They are read, but not
    written."""


@dataclass
class _Search:
    """What a search has come past so far."""

    exclude: Sequence[str]
    root: Path
    by_real_path: dict[str, Path] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    linked_folders: list[Path] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)


def find_files(
    paths: Sequence[Path], *, exclude: Sequence[str] = (), root: Path | None = None
) -> Discovery:
    """Sorted, without duplicates. `exclude`: globs of names, or of paths relative to `root`."""
    if missing := [str(path) for path in paths if not os.path.lexists(path)]:
        what = f"there is no {', no '.join(missing)}"
        raise UsageError(what, next_step="give files or folders that exist")

    search = _Search(exclude, root or Path.cwd())
    for path in paths:
        if path.is_dir():
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
    return Discovery(sorted(search.by_real_path.values()), search.problems, frozenset(outside))


def is_matched(path: Path, globs: Sequence[str], root: Path) -> bool:
    """By its name, or by its path below the root. A `*` matches slashes too.

    `old/train.py` is matched by `train.py`, `old/*` and `*.py`.
    """
    if not globs:
        return False

    below = os.path.relpath(path, root).replace(os.sep, "/")
    for glob in globs:
        pattern = glob.rstrip("/")
        if fnmatch(path.name, pattern) or fnmatch(below, pattern.removeprefix("./")):
            return True

    return False


def _walk(search: _Search, top: Path) -> None:
    """The files of a folder and of those in it; links to folders are left for later."""

    def report(error: OSError) -> None:
        message = f"the folder cannot be listed: {error.strerror}"
        search.problems.append(problem(UNREADABLE, error.filename, message))

    for name, folder_names, file_names in os.walk(top, onerror=report):
        folder = Path(name)
        real = os.path.realpath(folder)
        is_new = real not in search.folders
        search.folders.add(real)

        inner = [folder / name for name in sorted(folder_names)] if is_new else []
        inner = [path for path in inner if not _is_skipped(search, path)]
        search.linked_folders += [path for path in inner if path.is_symlink()]
        folder_names[:] = [path.name for path in inner if not path.is_symlink()]

        for path in (folder / name for name in file_names):
            is_file = _is_read(path) and path.is_file()
            if is_file and not is_matched(path, search.exclude, search.root):
                search.by_real_path.setdefault(os.path.realpath(path), path)


def _is_read(path: Path) -> bool:
    """Whether a file's name, or its first line, says that it is for the linter."""
    if path.name.endswith(SUFFIXES) or is_readme(path):
        return True
    if DOCKERFILE_NAMES.fullmatch(path.name) or DOCUMENT_NAMES.fullmatch(path.name):
        return True
    return _is_shell(path)


def is_readme(path: Path) -> bool:
    """A README, or documentation beside it: `README`, `docs/training.md`."""
    return path.suffix in ("", ".md", ".rst", ".txt") and bool(README_NAMES.fullmatch(path.name))


def _is_skipped(search: _Search, folder: Path) -> bool:
    """Whether it is hidden, made by a tool, a virtual environment, or excluded."""
    if folder.name.startswith(".") or folder.name in SKIPPED:
        return True
    if os.path.exists(folder / "pyvenv.cfg"):  # noqa: PTH110 - False without permission
        return True
    return is_matched(folder, search.exclude, search.root)


def _is_shell(path: Path) -> bool:
    """A program without an ending whose first line names a shell. Only these are opened."""
    try:
        if "." in path.name or not path.is_file():
            return False
        with path.open("rb") as file:
            return SHELL_SHEBANG.match(file.read(_FIRST_LINE_BYTES)) is not None
    except OSError:
        return False
