"""Which checkpoints are kept: the last few and the best few. One that is not finite never counts, so a run that has
become NaN deletes no finite one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from drumline.checkpoint import catalog, store
from drumline.checkpoint.manifest import CorruptCheckpointError, Manifest


def prune(
    root: Path,
    *,
    keep_last: int,
    keep_best: int,
    metric: str,
    higher_is_better: bool,
    newest: Path | None = None,
) -> list[Path]:
    """Remove all but the newest `keep_last` and the best `keep_best` finite ones; the newest valid one always stays.

    `newest`: the one that this process has just written. Without it, every byte is read to find the newest valid one:
    an older one goes only when that is known to be good.
    """
    newest = newest or catalog.newest_valid(root).path
    if newest is None:
        return []
    # A corrupt one that is newer than any valid one is left for the user to see: its step will be written again.
    newest_step = catalog.check_sizes(newest).step
    folders = [root / catalog.folder_name(step) for step in catalog.list_steps(root) if step <= newest_step]
    whole = _checked(folders)
    finite = [path for path in whole if whole[path].non_finite is None]
    last = sorted(finite, key=lambda path: -whole[path].step)[:keep_last]
    keep = {newest, *last, *_best(whole, metric, higher_is_better)[:keep_best]}
    removed = [path for path in folders if path not in keep]
    for path in removed:
        store.remove(path)
    return removed


def is_best(root: Path, metrics: Mapping[str, float], *, metric: str, higher_is_better: bool) -> bool:
    """Whether a checkpoint with these metrics would be the best of those that are there."""
    value = metrics.get(metric, math.nan)
    if not math.isfinite(value):
        return False
    whole = _checked([root / catalog.folder_name(step) for step in catalog.list_steps(root)])
    ranked = _best(whole, metric, higher_is_better)
    if not ranked:
        return True
    known = whole[ranked[0]].metrics[metric]
    return value >= known if higher_is_better else value <= known


def best(root: Path, *, metric: str, higher_is_better: bool) -> int | None:
    """The step of the best checkpoint that is there, if any was evaluated."""
    whole = _checked([root / catalog.folder_name(step) for step in catalog.list_steps(root)])
    ranked = _best(whole, metric, higher_is_better)
    return whole[ranked[0]].step if ranked else None


def _checked(folders: list[Path]) -> dict[Path, Manifest]:
    # Sizes only: reading every byte of all checkpoints at each save would cost more than the save.
    whole = {}
    for path in folders:
        try:
            whole[path] = catalog.check_sizes(path)
        except CorruptCheckpointError:
            continue
    return whole


def _best(whole: Mapping[Path, Manifest], metric: str, higher_is_better: bool) -> list[Path]:
    """Those that were evaluated, best first; of equals the newer."""
    sign = -1.0 if higher_is_better else 1.0
    scores = {
        path: (sign * found.metrics[metric], -found.step)
        for path, found in whole.items()
        if found.non_finite is None and math.isfinite(found.metrics.get(metric, math.nan))
    }
    return sorted(scores, key=lambda path: scores[path])
