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
README_NAMES = re.compile(r"README.*", re.IGNORECASE)
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
    """Links to folders are kept for later."""

    def report(error: OSError) -> None:
        message = f"the folder cannot be listed: {error.strerror}"
        search.problems.append(problem(UNREADABLE, error.filename, message))

    for name, folders, files in os.walk(top, onerror=report):
        folder = Path(name)
        real = os.path.realpath(folder)
        inner = [
            path for path in (folder / name for name in sorted(folders)) if _is_kept(search, path)
        ]
        if real in search.folders:
            inner = []
        search.folders.add(real)
        search.linked_folders += [path for path in inner if path.is_symlink()]
        folders[:] = [path.name for path in inner if not path.is_symlink()]
        for path in (folder / name for name in files):
            is_dockerfile = DOCKERFILE_NAMES.fullmatch(path.name) is not None
            is_document = DOCUMENT_NAMES.fullmatch(path.name) is not None
            is_text = is_dockerfile or is_document or is_readme(path)
            is_read = path.name.endswith(SUFFIXES) or is_text
            is_file = (is_read or _is_shell(path)) and path.is_file()
            if is_file and not is_matched(path, search.exclude, search.root):
                search.by_real_path.setdefault(os.path.realpath(path), path)


def is_readme(path: Path) -> bool:
    return path.suffix in ("", ".md", ".rst", ".txt") and bool(README_NAMES.fullmatch(path.name))


def _is_kept(search: _Search, folder: Path) -> bool:
    is_skipped = folder.name.startswith(".") or folder.name in SKIPPED
    is_environment = os.path.exists(folder / "pyvenv.cfg")  # noqa: PTH110 - False without permission
    return not (is_skipped or is_environment or is_matched(folder, search.exclude, search.root))


def _is_shell(path: Path) -> bool:
    """A program without an ending whose first line names a shell. Only these are opened."""
    try:
        if "." in path.name or not path.is_file():
            return False
        with path.open("rb") as file:
            return SHELL_SHEBANG.match(file.read(_FIRST_LINE_BYTES)) is not None
    except OSError:
        return False
