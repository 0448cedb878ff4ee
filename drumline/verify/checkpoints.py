"""Every checkpoint of a run against its manifest, byte for byte; and whether it is marked as not finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from drumline.checkpoint import look
from drumline.checkpoint.disk import readable_size
from drumline.checkpoint.manifest import FILE_NAME, Manifest, TornCheckpointError
from drumline.errors import CheckpointError
from drumline.verify.findings import Part

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Position:
    """Where a whole checkpoint says that the run stood."""

    step: int
    epoch: int
    position: int
    is_finite: bool = True


def check_checkpoints(root: Path, part: Part, progress: Progress) -> list[Position]:
    """Read all checkpoints; returns where the whole ones stand, in the order of their steps."""
    try:
        steps = look.list_steps(root)
        hidden = sorted(path.name for path in look.folders(root) if look.HIDDEN_NAME.fullmatch(path.name))
    except CheckpointError as error:
        part.problem(root.name, error.what)
        part.summary = "cannot be listed"
        return []
    whole = {}
    for number, step in enumerate(steps, start=1):
        path = root / look.folder_name(step)
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


def _check(path: Path, part: Part) -> Manifest | None:
    for is_last_try in (False, True):
        try:
            return look.verify(path)
        except TornCheckpointError as error:
            # A job at work may remove an old one, or replace this one, while it is read.
            if is_last_try and path.is_dir():
                part.problem(f"{path.parent.name}/{path.name}", f"torn: {error.reason}")
    return None


def _note_others(path: Path, found: Manifest, part: Part) -> None:
    try:
        others = sorted({file.name for file in path.iterdir()} - found.files.keys() - {FILE_NAME})
    except OSError:
        return
    if others:
        part.note(
            f"{path.parent.name}/{path.name}", f"holds what its manifest does not name: {', '.join(others)}"
        )


def _position(path: Path, manifest: Manifest, part: Part) -> Position | None:
    where = f"{path.parent.name}/{path.name}/progress.json"
    try:
        progress: Any = look.read_document(path, "progress")
        cursor = progress["cursor"]
        found = Position(progress["step"], cursor["epoch"], cursor["position"], manifest.non_finite is None)
        if not all(type(value) is int for value in astuple(found)[:3]):
            raise ValueError("not a position")
    except (TornCheckpointError, ValueError, KeyError, TypeError):
        if path.is_dir():
            part.problem(where, "does not say where the run stood")
        return None
    named = int(path.name.removeprefix("step-"))
    if found.step != named:
        part.problem(where, f"is that of step {found.step}")
    return found


def _size(path: Path) -> str:
    try:
        return f", {readable_size(sum(file.stat().st_size for file in path.iterdir()))}"
    except OSError:
        return ""


def _summary(count: int, whole: list[int], num_bytes: int) -> str:
    if not count:
        return "none yet"
    steps = ", ".join(map(str, whole)) if len(whole) <= 4 else f"{whole[0]} ... {whole[-1]}"
    named = f" (step {steps})" if whole else ""
    return f"{len(whole)} of {count} whole{named}, {readable_size(num_bytes)}"
