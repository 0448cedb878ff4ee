"""Which checkpoints are kept: the last few and the best few. A non-finite one never counts, so a
run that has become NaN deletes no finite one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from drumline.checkpoint import store
from drumline.runs import catalog
from drumline.runs.manifest import CorruptCheckpointError, Manifest

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest `keep_last` and the best `keep_best` by this metric."""

    keep_last: int
    keep_best: int = 0
    metric: str = ""
    higher_is_better: bool = True


def prune(
    root: Path,
    retention: Retention,
    *,
    newest: Path,
    may_remove: Callable[[int], bool] = lambda step: True,
) -> list[Path]:
    """Remove all that are not to be kept, but not `newest`, which is valid. One of a step that
    `may_remove` refuses is left for a later call."""
    # A corrupt checkpoint that is newer than any valid one is kept for the user: its step will be
    # written again.
    newest_step = catalog.check_sizes(newest).step
    folders = [
        root / catalog.folder_name(step) for step in catalog.list_steps(root) if step <= newest_step
    ]
    keep = {newest} | to_keep(_complete(folders), retention)
    removed = [
        path
        for path in folders
        if path not in keep and may_remove(int(path.name.removeprefix("step-")))
    ]
    for path in removed:
        store.remove(path)
    return removed


def to_keep(complete: Mapping[Key, Manifest], retention: Retention) -> set[Key]:
    """Which of these checkpoints are kept: the last and the best of those that are finite."""
    finite = [key for key in complete if complete[key].non_finite is None]
    last = sorted(finite, key=lambda key: -complete[key].step)[: retention.keep_last]
    best_first = ranked(complete, retention.metric, retention.higher_is_better)
    return {*last, *best_first[: retention.keep_best]}


def is_best(
    root: Path, metrics: Mapping[str, float], *, metric: str, higher_is_better: bool
) -> bool:
    """Whether a checkpoint with these metrics would be the best."""
    value = metrics.get(metric, math.nan)
    if not math.isfinite(value):
        return False
    best_so_far = _best(root, metric, higher_is_better)
    if best_so_far is None:
        return True
    return (
        value >= best_so_far.metrics[metric]
        if higher_is_better
        else value <= best_so_far.metrics[metric]
    )


def best(root: Path, *, metric: str, higher_is_better: bool) -> int | None:
    """The step of the best checkpoint, if any was evaluated."""
    checkpoint = _best(root, metric, higher_is_better)
    return None if checkpoint is None else checkpoint.step


def _best(root: Path, metric: str, higher_is_better: bool) -> Manifest | None:
    complete = _complete([root / catalog.folder_name(step) for step in catalog.list_steps(root)])
    order = ranked(complete, metric, higher_is_better)
    return complete[order[0]] if order else None


def _complete(folders: list[Path]) -> dict[Path, Manifest]:
    # Sizes only: reading every byte of all checkpoints at each save would cost more than the save.
    complete = {}
    for path in folders:
        with suppress(CorruptCheckpointError):
            complete[path] = catalog.check_sizes(path)
    return complete


def ranked(complete: Mapping[Key, Manifest], metric: str, higher_is_better: bool) -> list[Key]:
    """The evaluated ones, best first; the newer first if equal."""
    sign = -1.0 if higher_is_better else 1.0
    scores = {
        key: (sign * checkpoint.metrics[metric], -checkpoint.step)
        for key, checkpoint in complete.items()
        if checkpoint.non_finite is None and math.isfinite(checkpoint.metrics.get(metric, math.nan))
    }
    return sorted(scores, key=lambda key: scores[key])
