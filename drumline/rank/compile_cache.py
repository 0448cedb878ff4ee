"""The folder in which torch's compiler keeps what it compiled, which later runs load as code:
private to this user.

torch's own default is `torchinductor_USER` in the temporary directory, and whoever makes it first
decides what runs.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from drumline.base.errors import UsageError
from drumline.base.untrusted import check_own_folder

INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_CACHE = "TRITON_CACHE_DIR"


def use_private_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's and Triton's variables, for this process and those that it starts, unless the
    user has; a folder that others can write to is refused. Call it before torch's compiler is
    loaded, which sets torch's own default. The folder is on a local disk, as torch's own: a home
    directory may be on a network file system, which is slow for many small files."""
    for variable in (INDUCTOR_CACHE, TRITON_CACHE):
        folder = environment.get(variable)
        # Where it cannot be made, torch reports it when it compiles, and most runs compile nothing.
        if folder and _make(Path(folder)):
            _refuse_if_shared(Path(folder), variable)
    if not environment.get(INDUCTOR_CACHE):
        private_folder = Path(tempfile.gettempdir(), f"drumline-compile-{os.geteuid()}")
        _make(private_folder)
        _refuse_if_shared(private_folder, INDUCTOR_CACHE)  # also if someone else may make it later
        environment[INDUCTOR_CACHE] = str(private_folder)
    if not environment.get(TRITON_CACHE):
        environment[TRITON_CACHE] = str(Path(environment[INDUCTOR_CACHE], "triton"))


def _refuse_if_shared(folder: Path, variable: str) -> None:
    if danger := _danger(folder):
        raise UsageError(
            f"torch runs code from its compile cache {folder}, which is not safe: {danger}",
            next_step=f"set {variable} to a new folder that only you can write to",
        )


def _make(folder: Path) -> bool:
    """Whether it exists now."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.path.lexists(folder)


def _danger(folder: Path) -> str | None:
    """How others could place code in this folder; None: only this user and root can."""
    try:
        check_own_folder(folder, follow_links=True)
        entry = folder.stat()
    except OSError as error:
        return error.strerror
    if entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it (mode {stat.S_IMODE(entry.st_mode):o})"
    return None
