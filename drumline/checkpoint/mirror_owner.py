"""Which run folder uploads to a mirror: an id in `mirror.json` of both, so that no run replaces or deletes checkpoints
of another, and none resumes from an old folder what has continued elsewhere."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.checkpoint import catalog
from drumline.checkpoint.mirrored_run import MARKER, MirroredRun
from drumline.errors import CheckpointError, UsageError
from drumline.untrusted import make_own_folder, parse_json, read_regular, replace_text


def claim(run: MirroredRun, folder: Path, *, is_empty: bool, uploads: bool = False) -> str:
    """The id of the run in this folder, which the mirror gets, too, if this process `uploads`. Refuses the mirror of
    another run, and one that a run has been restored from since."""
    marker, owner = _read_marker(run, folder), run.owner()
    if is_empty:
        marker = marker or write_marker(run, folder)
    elif not marker or owner not in (None, marker["id"], marker["after"]):
        raise UsageError(
            f"{run.store} has checkpoints, and they are not of the run in {folder}",
            next_step="give --checkpoint.mirror a prefix of its own, or resume from there in an empty --run DIR",
        )
    if uploads and owner != marker["id"]:
        _put_owner(run, marker["id"])
    return str(marker["id"])


def check_owner(run: MirroredRun, own: str) -> None:
    """Raise if another run folder has claimed the mirror since."""
    if (owner := run.owner()) is None:  # someone has emptied it
        _put_owner(run, own)
    elif owner != own:
        raise UsageError(
            f"{run.store} has become the mirror of another run folder",
            next_step="stop one of the two runs, or give one of them another --checkpoint.mirror",
        )


def write_marker(run: MirroredRun, folder: Path, *, after: str | None = None) -> dict[str, Any]:
    """A new id for the run in this folder. `after`: that of the run which it continues."""
    marker = {"url": run.store.url, "id": secrets.token_hex(8), "after": after}
    try:
        make_own_folder(folder, follow_links=True)
        replace_text(folder / MARKER, json.dumps(marker) + "\n")
    except OSError as error:
        reason, next_step = catalog.explain_os_error(error, folder=folder)
        raise CheckpointError(f"{folder / MARKER} could not be written: {reason}", next_step=next_step) from error
    return marker


def _read_marker(run: MirroredRun, folder: Path) -> dict[str, Any]:
    """Empty: the run in this folder has no mirror at this address."""
    with suppress(OSError, ValueError):
        found = parse_json(read_regular(folder / MARKER))
        if isinstance(found, dict) and found.keys() >= {"url", "id", "after"} and found["url"] == run.store.url:
            return found
    return {}


def _put_owner(run: MirroredRun, own: str) -> None:
    run.store.put(MARKER, json.dumps({"id": own}).encode())
