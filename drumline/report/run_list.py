"""The run folders in a folder, each with its task, state, step, result and size: `drumline runs`.
No torch."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from drumline.base.errors import CheckpointError
from drumline.base.untrusted import read_toml
from drumline.metrics.display import metrics_of
from drumline.report.event_sample import MAX_STEP, WINDOW_BYTES, sampled_events, text
from drumline.runs.catalog import check_sizes, folder_name, list_steps
from drumline.runs.manifest import CorruptCheckpointError
from drumline.runs.run_folder import RunFolder, is_run
from drumline.watch.run_status import RunState, RunStatusReader

OWN_LOOP: Final = "own loop"
"""It has checkpoints of `ddp.checkpoint`, and no events."""
FolderState = RunState | Literal["corrupt", "own loop"]
MAX_REASON = 200


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A row of `drumline runs`."""

    run: Path
    task: str
    state: FolderState
    step: int
    """The latest that rank 0 reported; of an own loop, that of the newest complete checkpoint."""
    total_steps: int | None
    stopped: str | None
    """Why a hook ended the run before its last step; None: none did."""
    metrics: dict[str, float]
    """Of the latest evaluation."""
    num_bytes: int
    changed: float
    """When a file of it was last written, in Unix seconds."""


def list_runs(folder: Path) -> list[ListedRun]:
    """The run folders in a folder, or the folder itself if it is one; the last changed first."""
    if is_run(folder):
        return [listed(folder)]
    paths = [path for path in folder.iterdir() if path.is_dir() and is_run(path)]
    return sorted(map(listed, paths), key=lambda run: (-run.changed, str(run.run)))


def listed(path: Path) -> ListedRun:
    """Reads only the beginning and the end of the events."""
    folder = RunFolder(path)
    num_bytes, changed = _extent(path)
    events = list(sampled_events(folder.event_file(0), most_bytes=8 * WINDOW_BYTES))
    last = {event["kind"]: event for event in events}
    start = last.get("start", {})
    end = last.get("end", {})
    total = start.get("total_steps")
    final_metrics = end.get("metrics")
    if not isinstance(final_metrics, dict):
        final_metrics = {}
    state = folder_state(folder, has_events=bool(events))
    stopped = text(end.get("stopped"))[:MAX_REASON] if state == "done" else ""

    return ListedRun(
        run=path,
        task=text(start.get("task")),
        state=state,
        step=max(event["step"] for event in events) if events else newest_step(folder),
        total_steps=total if type(total) is int else None,
        stopped=stopped or None,
        metrics=metrics_of(last.get("evaluation") or final_metrics),
        num_bytes=num_bytes,
        changed=changed,
    )


def newest_step(folder: RunFolder) -> int:
    """The step of the newest checkpoint whose files have the sizes of its manifest; 0: there is
    none."""
    try:
        steps = list_steps(folder.checkpoints)
    except CheckpointError:
        return 0

    for step in reversed(steps):
        if step < MAX_STEP and _is_complete(folder.checkpoints / folder_name(step)):
            return step

    return 0


def _is_complete(checkpoint: Path) -> bool:
    """Whether its files have the sizes of its manifest."""
    try:
        check_sizes(checkpoint)
    except CorruptCheckpointError:
        return False
    return True


def folder_state(folder: RunFolder, *, has_events: bool) -> FolderState:
    """The state of a run, also of a folder that is damaged or of an own loop."""
    try:
        read_toml(folder.config_file)
        has_settings = True
    except FileNotFoundError:
        has_settings = False
    except (OSError, ValueError):
        return "corrupt"

    state = RunStatusReader(folder.path).read().state
    if has_events or state == "running":
        return state

    return "corrupt" if has_settings or os.path.lexists(folder.event_file(0)) else OWN_LOOP


def _extent(path: Path) -> tuple[int, float]:
    """The bytes of all files, and the time of the last change. Links are not followed."""
    num_bytes = 0
    changed = 0.0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # a running job deletes old checkpoints
                status = Path(folder, name).lstat()
                num_bytes += status.st_size
                changed = max(changed, status.st_mtime)

    return num_bytes, changed
