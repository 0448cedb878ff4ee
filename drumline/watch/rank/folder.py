"""The watch folder: of this node, this attempt and this user alone, in memory where that can be written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from drumline.errors import PreflightError
from drumline.launch.node.watch_folder import MEMORY, make_memory_folder
from drumline.launch.rank_environment import WITHOUT_WATCH


def make_folder(given: Path | None) -> Path:
    """The one that the launcher gave, made where it is not there yet; else a new one. Never one that others can use."""
    if given is not None:
        return _take(given)
    try:
        return make_memory_folder()
    except OSError as error:
        raise PreflightError(
            f"no folder for the watch can be made in {MEMORY} or the temporary folder: {error.strerror}",
            next_step="free some space there, or set TMPDIR to a folder on a disk of this host; or train without the "
            f"watchdog: {WITHOUT_WATCH}",
        ) from error


def _take(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # a link would lead to wherever its owner likes
    except OSError as error:
        raise _refused(folder, f"cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(folder, "is no folder")
    if found.st_uid != os.geteuid():
        raise _refused(folder, f"belongs to user {found.st_uid}, and this is user {os.geteuid()}")
    if found.st_mode & 0o077:
        raise _refused(folder, f"is open to others (mode {stat.S_IMODE(found.st_mode):o}, 700 is needed)")
    return folder


def _refused(folder: Path, why: str) -> PreflightError:
    return PreflightError(
        f"the watch folder {folder} {why}",
        next_step="leave DRUMLINE_WATCH_DIR to the launcher, or name a folder that does not exist yet",
    )
