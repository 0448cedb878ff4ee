"""Between a running job and its checkpoints: what is gathered for one, and how all ranks start from one.

Rank 0 writes and reads; the others get what they need over collectives, so that only rank 0 needs the folder.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drumline.checkpoint import look, state, store
from drumline.checkpoint.retention import prune
from drumline.checkpoint.rng import capture_rng, restore_rng
from drumline.config.schema import CheckpointConfig
from drumline.data.plan import Cursor
from drumline.distributed.collectives import (
    broadcast_buffers,
    broadcast_json,
    broadcast_tensors,
    gather_tensors,
)
from drumline.engine.job import Job
from drumline.errors import CheckpointError

log = logging.getLogger("drumline")


@dataclass
class Progress:
    """How far a run has come. Changed by the loop alone; everyone may look."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was just written."""

    path: Path
    num_bytes: int
    seconds: float


def save(
    job: Job,
    progress: Progress,
    *,
    root: Path,
    keep: CheckpointConfig,
    facts: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Saved | None:
    """Collective: write a checkpoint and let old ones go. Only rank 0 learns what was written."""
    started = time.perf_counter()
    broadcast_buffers(job.plain_model)
    device = job.ddp.device
    rng = gather_tensors(capture_rng(device), device=device)
    if not job.ddp.is_main_process():
        return None
    snapshot = state.capture(
        job.model, job.optimizer, scaler=job.scaler, progress={**asdict(progress), "facts": dict(facts)}
    )
    path = store.write(
        root,
        progress.step,
        tensors={
            **snapshot.tensors,
            "rng": {_rank_name(rank): generators for rank, generators in enumerate(rng)},
        },
        documents=snapshot.documents,
        metrics=metrics,
    )
    _let_old_ones_go(job, root, keep)
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    return Saved(path, num_bytes, time.perf_counter() - started)


def _let_old_ones_go(job: Job, root: Path, keep: CheckpointConfig) -> None:
    try:
        prune(
            root,
            keep_last=keep.keep_last,
            keep_best=keep.keep_best,
            metric=job.task.best_metric,
            higher_is_better=job.task.higher_is_better,
        )
    except CheckpointError as error:
        log.warning(str(error))  # the new one is safe; that an old one stays is no reason to stop


def find_newest(job: Job, root: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Collective: the newest whole checkpoint, and the torn ones that are newer, each with what is wrong with it."""
    answer: Any = None
    if job.ddp.is_main_process():
        found = look.newest_valid(root)
        answer = [str(found.path or ""), [(str(path), reason) for path, reason in found.skipped]]
    path, skipped = broadcast_json(answer, device=job.ddp.device)
    return Path(path) if path else None, [(Path(torn), reason) for torn, reason in skipped]


def restore(job: Job, path: Path) -> tuple[Progress, dict[str, Any]]:
    """Collective: put the job back to where a checkpoint was taken; returns how far that was, and its facts."""
    device = job.ddp.device
    read = store.read(path) if job.ddp.is_main_process() else None
    documents = broadcast_json(None if read is None else read.documents, device=device)
    tensors = {
        name: broadcast_tensors(None if read is None else read.tensors[name], device=device)
        for name in ("model", "optimizer", "rng")
    }
    saved = state.restore(store.Snapshot(tensors, documents), job.model, job.optimizer, scaler=job.scaler)
    # A rank that the saved world did not have keeps the stream that it was just seeded with.
    if (generators := tensors["rng"].get(_rank_name(job.ddp.rank))) is not None:
        restore_rng(generators, device)
    return Progress(saved["step"], Cursor(**saved["cursor"])), saved["facts"]


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"
