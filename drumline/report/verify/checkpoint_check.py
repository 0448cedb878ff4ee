"""Compares every checkpoint of a run with its manifest, byte by byte, and reports those that are
not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from drumline.base.errors import CheckpointError
from drumline.base.text import file_size
from drumline.report.verify.event_check import RankEvents
from drumline.report.verify.section import Section
from drumline.runs import catalog
from drumline.runs.manifest import FILE_NAME, CorruptCheckpointError, Manifest

Progress = Callable[[str], None]
Verify = Callable[[Path], Manifest]
"""Compares a checkpoint with its manifest: `catalog.verify`, or that of a mirror."""


@dataclass(frozen=True)
class SavedPosition:
    """The step and the data position in a complete checkpoint."""

    step: int
    epoch: int
    position: int
    is_finite: bool = True
    in_own_loop: bool = False
    """Saved by `ddp.checkpoint`, which knows no position."""


def check_checkpoints(
    root: Path,
    section: Section,
    progress: Progress,
    verify: Verify = catalog.verify,
) -> list[SavedPosition]:
    """Read all checkpoints; returns the positions of the complete ones, in the order of their
    steps."""
    try:
        steps = catalog.list_steps(root)
        names = [path.name for path in catalog.folders(root)]
    except CheckpointError as error:
        section.problem(root.name, error.what)
        section.summary = "cannot be listed"
        return []

    complete: list[SavedPosition] = []
    saved: list[int] = []
    num_bytes = 0
    num_non_finite = 0
    for number, step in enumerate(steps, start=1):
        path = root / catalog.folder_name(step)
        progress(f"checkpoint {number} of {len(steps)}: {path.name}")
        manifest = _check(path, section, verify)
        if manifest is None:
            continue
        saved.append(manifest.step)
        num_bytes += sum(record.size for record in manifest.files.values())
        if manifest.non_finite is not None:
            num_non_finite += 1
            what = f"{manifest.non_finite} is not finite (NaN or infinity)"
            section.problem(f"{root.name}/{path.name}", what)
        position = _position(path, manifest, section)
        if position is not None:
            complete.append(position)

    for name in sorted(filter(catalog.HIDDEN_NAME.fullmatch, names)):
        section.note(
            f"{root.name}/{name}", "left by a save that did not finish; the next save deletes it"
        )

    # Without one that a running job has just removed.
    count = sum((root / catalog.folder_name(step)).is_dir() for step in steps)
    section.counts = {
        "checkpoints": count,
        "complete": len(saved),
        "non_finite": num_non_finite,
        "bytes": num_bytes,
    }
    listed = ", ".join(map(str, saved)) if len(saved) <= 4 else f"{saved[0]} ... {saved[-1]}"
    named = f" (step {listed})" if saved else ""
    section.summary = (
        f"{len(saved)} of {count} complete{named}, {file_size(num_bytes)}" if count else "none yet"
    )
    return complete


def _check(path: Path, section: Section, verify: Verify) -> Manifest | None:
    """The manifest of a checkpoint that is as it says; None: it is not, or it was removed."""
    where = f"{path.parent.name}/{path.name}"
    for is_last_try in (False, True):
        try:
            manifest = verify(path)
            unlisted = sorted(
                {file.name for file in path.iterdir()} - manifest.files.keys() - {FILE_NAME}
            )
        except (CorruptCheckpointError, OSError) as error:
            # A running job may remove or replace a checkpoint while it is read.
            if is_last_try and path.is_dir():
                section.problem(where, f"corrupt or incomplete: {getattr(error, 'reason', error)}")
            continue
        if unlisted:
            section.note(where, f"has files that are not in its manifest: {', '.join(unlisted)}")
        return manifest

    return None


def _position(path: Path, manifest: Manifest, section: Section) -> SavedPosition | None:
    """The step and position of a checkpoint; None: it has none that is valid."""
    where = f"{path.parent.name}/{path.name}/progress.json"
    try:
        progress: Any = catalog.read_document(path, "progress")
        is_own = "objects" in progress
        cursor = {"epoch": 0, "position": 0} if is_own else progress["cursor"]
        is_finite = manifest.non_finite is None
        saved = SavedPosition(
            progress["step"],
            cursor["epoch"],
            cursor["position"],
            is_finite,
            is_own,
        )
        if not all(type(value) is int for value in astuple(saved)[:3]):
            raise ValueError("not a position")
    except (CorruptCheckpointError, ValueError, KeyError, TypeError):
        if path.is_dir():
            section.problem(where, "has no valid step and position")
        return None

    if saved.step != int(path.name.removeprefix("step-")):
        section.problem(where, f"belongs to step {saved.step}")
    return saved


def check_newest_save(
    root: Path,
    section: Section,
    reported: RankEvents,
    *,
    is_at_work: bool,
) -> None:
    """The checkpoint of the latest save is kept until a newer one is complete. (A running job may
    be saving.)"""
    if reported.of_kinds("checkpoint") and not section.counts.get("checkpoints", 1):
        section.summary = "none is left"
    saves = reported.of_kinds("checkpoint", "resume")
    if not saves or is_at_work:
        return

    newest = saves[-1]
    name = catalog.folder_name(newest.step)
    # A save that was killed while it replaced a checkpoint of the same step leaves the earlier one
    # under that name.
    if (root / name).exists() or (root / f".{name}.replaced").exists():
        return

    how = "saved it" if newest.kind == "checkpoint" else "resumed from it"
    where = f"events/rank-00000.jsonl, line {newest.line}"
    section.problem(f"{root.name}/{name}", f"is missing, though the run {how} ({where})")
    if section.counts.get("checkpoints"):
        section.summary += "; the newest is missing"
