"""Every checkpoint of a run against its manifest, byte for byte; and whether it is marked as not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from drumline.audit.event_check import EventSummary
from drumline.audit.ledger_history import FILE
from drumline.audit.section import Section
from drumline.checkpoint import catalog
from drumline.checkpoint.manifest import FILE_NAME, CorruptCheckpointError, Manifest
from drumline.errors import CheckpointError
from drumline.text import file_size, join_names

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SavedPosition:
    """Where a whole checkpoint says that the run stood."""

    step: int
    epoch: int
    position: int
    is_finite: bool = True


def check_checkpoints(root: Path, part: Section, progress: Progress) -> list[SavedPosition]:
    """Read all checkpoints; returns where the whole ones stand, in the order of their steps."""
    try:
        steps = catalog.list_steps(root)
        hidden = sorted(
            path.name for path in catalog.folders(root) if catalog.HIDDEN_NAME.fullmatch(path.name)
        )
    except CheckpointError as error:
        part.problem(root.name, error.what)
        part.summary = "cannot be listed"
        return []
    whole = {}
    for number, step in enumerate(steps, start=1):
        path = root / catalog.folder_name(step)
        progress(f"checkpoint {number} of {len(steps)}: {path.name}{_size(path)}")
        if (found := _check(path, part)) is not None:
            whole[path] = found
            _note_others(path, found, part)
    for name in hidden:
        part.note(f"{root.name}/{name}", "left by a save that did not finish; the next save clears it away")
    num_bytes = sum(record.size for found in whole.values() for record in found.files.values())
    count = len(whole) + len(part.problems)  # one that a job at work has removed meanwhile does not count
    part.summary = _summary(count, [found.step for found in whole.values()], num_bytes)
    positions = [_position(path, found, part) for path, found in whole.items()]
    non_finite = {path: found.non_finite for path, found in whole.items() if found.non_finite is not None}
    part.counts = {
        "checkpoints": count,
        "whole": len(whole),
        "non_finite": len(non_finite),
        "bytes": num_bytes,
    }
    for path, tensor in non_finite.items():
        part.problem(f"{root.name}/{path.name}", f"{tensor} is not finite (NaN or infinity)")
    return [position for position in positions if position is not None]


def _check(path: Path, part: Section) -> Manifest | None:
    for is_last_try in (False, True):
        try:
            return catalog.verify(path)
        except CorruptCheckpointError as error:
            # A job at work may remove an old one, or replace this one, while it is read.
            if is_last_try and path.is_dir():
                part.problem(f"{path.parent.name}/{path.name}", f"corrupt or incomplete: {error.reason}")
    return None


def _note_others(path: Path, found: Manifest, part: Section) -> None:
    try:
        others = sorted({file.name for file in path.iterdir()} - found.files.keys() - {FILE_NAME})
    except OSError:
        return
    if others:
        part.note(
            f"{path.parent.name}/{path.name}", f"holds what its manifest does not name: {', '.join(others)}"
        )


def _position(path: Path, manifest: Manifest, part: Section) -> SavedPosition | None:
    where = f"{path.parent.name}/{path.name}/progress.json"
    try:
        progress: Any = catalog.read_document(path, "progress")
        cursor = progress["cursor"]
        found = SavedPosition(
            progress["step"], cursor["epoch"], cursor["position"], manifest.non_finite is None
        )
        if not all(type(value) is int for value in astuple(found)[:3]):
            raise ValueError("not a position")
    except (CorruptCheckpointError, ValueError, KeyError, TypeError):
        if path.is_dir():
            part.problem(where, "does not say where the run stood")
        return None
    named = int(path.name.removeprefix("step-"))
    if found.step != named:
        part.problem(where, f"is that of step {found.step}")
    return found


def _size(path: Path) -> str:
    try:
        return f", {file_size(sum(file.stat().st_size for file in path.iterdir()))}"
    except OSError:
        return ""


def _summary(count: int, whole: list[int], num_bytes: int) -> str:
    if not count:
        return "none yet"
    steps = ", ".join(map(str, whole)) if len(whole) <= 4 else f"{whole[0]} ... {whole[-1]}"
    named = f" (step {steps})" if whole else ""
    return f"{len(whole)} of {count} whole{named}, {file_size(num_bytes)}"


def check_newest_save(root: Path, part: Section, reported: EventSummary, *, is_at_work: bool) -> None:
    """The checkpoint of the latest save stays until a newer one is whole. (A job at work may be just there.)"""
    if reported.has_saved and not part.counts.get("checkpoints", 1):
        part.summary = "none is left"
    if reported.stands is None or is_at_work:
        return
    name = catalog.folder_name(reported.stands.step)
    # Killed while it replaced one of the same step, a save leaves that one aside, for the run to go on from.
    if (root / name).exists() or (root / f".{name}.replaced").exists():
        return
    how = "saved it" if reported.stands.kind == "checkpoint" else "went on from it"
    where = f"events/rank-00000.jsonl, line {reported.stands.line}"
    part.problem(f"{root.name}/{name}", f"is missing, though the run {how} ({where})")
    if part.counts.get("checkpoints"):
        part.summary += "; the newest is missing"


def check_saves_are_reported(saved: list[SavedPosition], part: Section, reported: EventSummary) -> None:
    """Rank 0 reports each save before the next; the newest one may have been its last act."""
    if not reported.has_rank_0:
        return
    unknown = [position.step for position in saved[:-1] if position.step not in reported.known]
    if unknown and reported.is_numbered:
        steps = f"step{'s' if len(unknown) > 1 else ''} {join_names(unknown)}"
        part.problem("events/rank-00000.jsonl", f"does not tell of the checkpoints that there are of {steps}")


def tell_no_ledger(part: Section, *, is_expected: bool) -> None:
    """There is none, which is as it may be only before the first save."""
    if is_expected:
        part.problem(FILE, "is missing, though the run has taken steps")
    else:
        part.note(FILE, "is not there: no step was saved, or an older version trained")
