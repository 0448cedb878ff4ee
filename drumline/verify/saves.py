"""The saves that rank 0 reported against what is there of them: checkpoints, and the ledger."""

from __future__ import annotations

from pathlib import Path

from drumline.checkpoint import look
from drumline.text import join_names
from drumline.verify.checkpoints import Position
from drumline.verify.events import Reported
from drumline.verify.findings import Part
from drumline.verify.history import FILE


def check_newest_save(root: Path, part: Part, reported: Reported, *, is_at_work: bool) -> None:
    """The checkpoint of the latest save stays until a newer one is whole. (A job at work may be just there.)"""
    if reported.has_saved and not part.counts.get("checkpoints", 1):
        part.summary = "none is left"
    if reported.stands is None or is_at_work:
        return
    name = look.folder_name(reported.stands.step)
    # Killed while it replaced one of the same step, a save leaves that one aside, for the run to go on from.
    if (root / name).exists() or (root / f".{name}.replaced").exists():
        return
    how = "saved it" if reported.stands.kind == "checkpoint" else "went on from it"
    where = f"events/rank-00000.jsonl, line {reported.stands.line}"
    part.problem(f"{root.name}/{name}", f"is missing, though the run {how} ({where})")
    if part.counts.get("checkpoints"):
        part.summary += "; the newest is missing"


def check_saves_are_reported(saved: list[Position], part: Part, reported: Reported) -> None:
    """Rank 0 reports each save before the next; the newest one may have been its last act."""
    if not reported.has_rank_0:
        return
    unknown = [position.step for position in saved[:-1] if position.step not in reported.known]
    if unknown and reported.is_numbered:
        steps = f"step{'s' if len(unknown) > 1 else ''} {join_names(unknown)}"
        part.problem("events/rank-00000.jsonl", f"does not tell of the checkpoints that there are of {steps}")


def tell_no_ledger(part: Part, *, is_expected: bool) -> None:
    """There is none, which is as it may be only before the first save."""
    if is_expected:
        part.problem(FILE, "is missing, though the run has taken steps")
    else:
        part.note(FILE, "is not there: no step was saved, or an older version trained")
