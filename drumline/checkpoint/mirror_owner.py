"""Which run folder uploads to a mirror: an id in `mirror.json` of both, so that no run replaces or
deletes checkpoints of another. In the mirror are the ids of the folders before, too, from which the
run was restored."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from drumline.base.errors import CheckpointError, UsageError
from drumline.base.untrusted import make_own_folder, parse_json, read_regular, replace_text
from drumline.checkpoint.mirrored_run import (
    CHECKPOINTS,
    MARKER,
    RUN_FILES,
    RUN_FOLDERS,
    MirroredRun,
)
from drumline.runs import catalog
from drumline.storage.backend import StoreError

_ID = re.compile(r"[0-9a-f]{16}")


def claim(run: MirroredRun, folder: Path, *, is_empty: bool, uploads: bool = False) -> str:
    """The id of the run in this folder, which the mirror gets, too, if this process `uploads`: call
    `check_owner` then, since another one may have been faster. Refuses the mirror of another run,
    and one that a run has been restored from since."""
    marker = _read_marker(run, folder)
    marker_object, owners = _read_owners(run)
    owner = owners[-1] if owners else None
    if is_empty:
        marker = marker or write_marker(run, folder)
    elif not marker or owner not in (None, marker["id"], marker["after"]):
        raise UsageError(
            f"{run.store} has checkpoints, and they are not of the run in {folder}",
            next_step="give --checkpoint.mirror a prefix of its own, or resume from there in an empty --run DIR",
        )
    if uploads and owner != marker["id"]:
        _put_owners(
            run, marker_object, [*(owners if owner == marker["after"] else ()), marker["id"]]
        )
    return str(marker["id"])


def set_aside(run: MirroredRun, folder: Path, *, newest: int, mirrored: int) -> Path | None:
    """If the run in this folder was restored elsewhere, and has continued there: move its files to
    a folder in it, where nothing is lost. Refuses if they hold a later step than the mirror.
    `newest` is here, `mirrored` there."""
    run_id = _read_marker(run, folder).get("id")
    if run_id not in _read_owners(run)[1][:-1]:
        return None
    if newest > mirrored:
        raise UsageError(
            f"the run in {folder} has continued elsewhere, up to step {mirrored} in {run.store}; step {newest} here is "
            "not there",
            next_step="move this folder away to resume from there, or continue from here with another "
            "--checkpoint.mirror",
        )
    aside = folder / f"before-{run_id}"
    _make_aside(aside)
    with _writing(aside):
        # The marker last: without it, this folder is no part of the run.
        for name in (*RUN_FILES, *RUN_FOLDERS, CHECKPOINTS, MARKER):
            with suppress(FileNotFoundError):
                (folder / name).rename(aside / name)
    return aside


def check_owner(run: MirroredRun, run_id: str) -> None:
    """Raise if another run folder has claimed the mirror since."""
    marker_object, owners = _read_owners(run)
    if not owners:  # someone has emptied it
        _put_owners(run, marker_object, [run_id])
    elif owners[-1] != run_id:
        raise UsageError(
            f"{run.store} has become the mirror of another run folder",
            next_step="stop one of the two runs, or give one of them another --checkpoint.mirror",
        )


def write_marker(run: MirroredRun, folder: Path, *, continues: bool = False) -> dict[str, Any]:
    """A new id for the run in this folder. `continues`: it is restored from the mirror."""
    after = next(reversed(_read_owners(run)[1]), None) if continues else None
    marker = {"url": run.store.url, "id": secrets.token_hex(8), "after": after}
    with _writing(folder / MARKER):
        make_own_folder(folder, follow_links=True)
        replace_text(folder / MARKER, json.dumps(marker) + "\n")
    return marker


def _read_marker(run: MirroredRun, folder: Path) -> dict[str, Any]:
    """Empty: the run in this folder has no mirror at this address."""
    with suppress(OSError, ValueError):
        marker = parse_json(read_regular(folder / MARKER))
        if isinstance(marker, dict) and marker.get("url") == run.store.url and _has_ids(marker):
            return marker
    return {}


def _has_ids(marker: dict[str, Any]) -> bool:
    after = marker.get("after")
    return _is_id(marker.get("id")) and (after is None or _is_id(after))


def _is_id(value: object) -> bool:
    """Someone else may have written it, and a folder gets its name from it."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _read_owners(run: MirroredRun) -> tuple[bytes | None, list[str]]:
    """The object, and the ids of the run folders that have uploaded there, each restored from the
    one before; the last does so now. Empty if there are none, or what a killed upload left."""
    try:
        content = run.store.read(MARKER)
    except StoreError as error:
        if not error.is_bad_copy:
            raise
        return None, []
    with suppress(ValueError, LookupError, TypeError):
        ids = list(parse_json(content)["ids"])
        if all(map(_is_id, ids)):
            return content, ids
    return content, []


def _make_aside(aside: Path) -> None:
    """A move that was killed is continued; a link that came with the run folder is not followed."""
    try:
        make_own_folder(aside)
    except OSError as error:
        raise CheckpointError(
            f"{aside} cannot be used: {error.strerror}",
            next_step="move it away, or resume in another --run DIR",
        ) from error


def _put_owners(run: MirroredRun, marker_object: bytes | None, ids: list[str]) -> None:
    run.store.put_after(marker_object, MARKER, json.dumps({"ids": ids}).encode())


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason, next_step = catalog.explain_os_error(error, folder=path.parent)
        raise CheckpointError(
            f"{path} could not be written: {reason}", next_step=next_step
        ) from error
