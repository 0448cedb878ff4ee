"""Which checkpoints are kept: the last few and the best few. A non-finite one never counts, so a
run that has become NaN deletes no finite one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drumline.checkpoint import store
from drumline.runs import catalog
from drumline.runs.manifest import CorruptCheckpointError, Manifest


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest `keep_last` and the best `keep_best` by this metric."""

    keep_last: int
    """So many of the newest are kept."""

    keep_best: int = 0
    """So many of the best are kept."""

    metric: str = ""
    """A name in `Manifest.metrics`."""

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
    complete = complete_checkpoints(root)
    older = {step: complete[step] for step in complete if step <= newest_step}
    keep = {newest_step} | to_keep(older, retention)

    removed = [
        root / catalog.folder_name(step)
        for step in catalog.list_steps(root)
        if step <= newest_step and step not in keep and may_remove(step)
    ]

    for path in removed:
        store.remove(path)

    return removed


def to_keep(complete: Mapping[int, Manifest], retention: Retention) -> set[int]:
    """Which of these checkpoints, by step, are kept: the last and the best of those that are finite."""
    finite = [step for step in complete if complete[step].non_finite is None]
    last = sorted(finite, reverse=True)[: retention.keep_last]
    best_first = ranked(complete, retention.metric, retention.higher_is_better)

    return {*last, *best_first[: retention.keep_best]}


def is_best(
    root: Path,
    metrics: Mapping[str, float],
    *,
    metric: str,
    higher_is_better: bool,
) -> bool:
    """Whether a checkpoint with these metrics would be the best."""
    value = metrics.get(metric, math.nan)
    if not math.isfinite(value):
        return False

    complete = complete_checkpoints(root)
    best_first = ranked(complete, metric, higher_is_better)
    if not best_first:
        return True

    best_value = complete[best_first[0]].metrics[metric]
    return value >= best_value if higher_is_better else value <= best_value


def best(root: Path, *, metric: str, higher_is_better: bool) -> int | None:
    """The step of the best checkpoint, if any was evaluated."""
    best_first = ranked(complete_checkpoints(root), metric, higher_is_better)
    return best_first[0] if best_first else None


def complete_checkpoints(root: Path) -> dict[int, Manifest]:
    """The checkpoints of a folder whose files all have their sizes, by step. Reading every byte of
    them at each save would cost more than the save."""
    complete = {}
    for step in catalog.list_steps(root):
        with suppress(CorruptCheckpointError):
            complete[step] = catalog.check_sizes(root / catalog.folder_name(step))

    return complete


def ranked(complete: Mapping[int, Manifest], metric: str, higher_is_better: bool) -> list[int]:
    """The evaluated ones, best first; the newer first if equal."""
    sign = -1.0 if higher_is_better else 1.0
    scores = {}
    for step, checkpoint in complete.items():
        value = checkpoint.metrics.get(metric, math.nan)
        if checkpoint.non_finite is None and math.isfinite(value):
            scores[step] = (sign * value, -step)

    return sorted(scores, key=scores.__getitem__)
