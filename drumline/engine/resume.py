"""Resuming from the newest complete checkpoint: rank 0 reads it and sends the other ranks what they need, so that only
rank 0 needs the folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.checkpoint import catalog, state, store
from drumline.checkpoint.manifest import CorruptCheckpointError
from drumline.checkpoint.optimizer_state import decode
from drumline.checkpoint.rng import CorruptRandomStateError, check_rng, restore_rng
from drumline.data.sharding import Cursor
from drumline.distributed.collectives import broadcast_json, broadcast_tensors
from drumline.engine.job import Job, Progress
from drumline.engine.optimizer import OPTIMIZERS
from drumline.engine.run_context import RunContext
from drumline.engine.run_settings import check_not_finished, resets_optimizer
from drumline.engine.saver import DATA_FILE
from drumline.errors import CheckpointError, CheckpointMismatchError, OptimizerMismatchError
from drumline.manager import DDPManager
from drumline.watch.heartbeat import Phase

_FACTS = {"task": str, "config": dict, "world_size": int, "batch_size": int}


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest complete and finite checkpoint, and newer ones that were skipped, each with the reason."""

    path: Path
    facts: dict[str, Any]
    progress: Progress
    """How far the run was when it was saved."""
    skipped: list[tuple[Path, str]]
    non_finite: str | None
    """Where no checkpoint is finite: a tensor of this one that is not."""


def find_newest(ddp: DDPManager, root: Path) -> FoundCheckpoint | None:
    """Collective: the checkpoint to resume from; None: the run starts."""
    answer: Any = None
    if ddp.is_main_process():
        path, skipped = catalog.newest_valid(root, _check_contents)
        saved = None if path is None else catalog.read_document(path, "progress")
        non_finite = None if path is None else catalog.check_sizes(path).non_finite
        answer = [str(path or ""), saved, [(str(one), reason) for one, reason in skipped], non_finite]
    path, saved, skipped, non_finite = broadcast_json(answer, device=ddp.device)
    if skipped and not path:
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {root} is complete; the newest: {skipped[0][1]}",
            next_step="restore one from a backup, or start a new run with --fresh, which moves this one aside",
        )
    if not path:
        return None
    progress = Progress(saved["step"], Cursor(**saved["cursor"]))
    named = [(Path(one), reason) for one, reason in skipped]
    return FoundCheckpoint(Path(path), saved["facts"], progress, named, non_finite)


def _check_contents(path: Path) -> None:
    """What the checksums do not show: whoever wrote them may have written anything."""
    found = store.read(path)
    documents = [found.documents.get(name) for name in ("model", "optimizer", "progress")]
    if not {"model", "optimizer", "rng"} <= found.tensors.keys() or not all(map(_is_dict, documents)):
        raise CorruptCheckpointError(path, "it does not hold a model, an optimizer, random states and progress")
    saved = found.documents["progress"]
    facts, cursor = saved.get("facts"), saved.get("cursor")
    is_complete = (
        _is_dict(facts)
        and all(type(facts.get(name)) is kind for name, kind in _FACTS.items())
        and str(facts["config"].get("optim.name")) in OPTIMIZERS
        and _is_dict(cursor)
        and cursor.keys() == {"epoch", "position"}
        and all(type(count) is int and 0 <= count < 1 << 62 for count in (saved.get("step"), *cursor.values()))
        and saved["step"] == catalog.check_sizes(path).step
    )
    if not is_complete:
        raise CorruptCheckpointError(path, "progress.json does not say where the run was")
    try:
        for generators in found.tensors["rng"].values():
            check_rng(generators)
    except CorruptRandomStateError as error:
        raise CorruptCheckpointError(path, f"rng.safetensors: {error.reason}") from error


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def resume(context: RunContext, found: FoundCheckpoint) -> None:
    """Collective: continue from this checkpoint, unless the run has finished and its settings have changed."""
    request, job, at = context.request, context.job, found.progress
    check_not_finished(found.facts, request, step=at.step, total_steps=context.total_steps)
    restore(job, found.path, with_optimizer=not resets_optimizer(found.facts, request))
    context.progress.step, context.progress.cursor = at.step, at.cursor
    job.loader.cursor = at.cursor


def restore(job: Job, path: Path, *, with_optimizer: bool = True) -> None:
    """Collective: put the job back to where a checkpoint was taken. `with_optimizer=False`: its optimizer stays new."""
    job.ddp.heartbeat.mark(Phase.START)
    device = job.ddp.device
    read = store.read(path) if job.ddp.is_main_process() else None
    documents = broadcast_json(None if read is None else read.documents, device=device)
    data_files = [DATA_FILE] if documents.get(DATA_FILE, {}).get("has_tensors") else []
    tensors = {
        name: broadcast_tensors(None if read is None else read.tensors[name], device=device)
        for name in ("model", "optimizer", "rng", *data_files)
    }
    snapshot = store.Snapshot(tensors, documents)
    _restore_data(job, snapshot)
    # The settings of the optimizer are those of this start; its rate is set before each step.
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in job.optimizer.param_groups
    ]
    # An earlier version saved the name in the settings only.
    name = documents["progress"]["facts"]["config"]["optim.name"]
    documents["optimizer"].setdefault("class", OPTIMIZERS[name].__name__)
    try:
        optimizer = job.optimizer if with_optimizer else None
        saved = state.restore(snapshot, job.model, optimizer, scaler=job.scaler)
    except CheckpointMismatchError as error:
        instead = "start a new run: --fresh moves this one aside, --run DIR trains in another folder"
        if isinstance(error, OptimizerMismatchError):
            instead = "reset the optimizer and keep the weights with --optim.reset"
        error.next_step = f"{error.next_step}, or {instead}"
        raise
    for group, own in zip(job.optimizer.param_groups, settings, strict=True):
        group.update(own)
    # A rank that the saved world did not have keeps the random stream that it was just seeded with.
    if (generators := tensors["rng"].get(f"rank-{job.ddp.rank:05d}")) is not None:
        restore_rng(generators, device)
    if job.ddp.is_main_process() and "measured" in saved:
        with state.translated("progress"):
            job.meter.put(**saved["measured"])


def _restore_data(job: Job, snapshot: store.Snapshot) -> None:
    """Put this rank's dataset back to its position, if it keeps one."""
    if DATA_FILE not in snapshot.documents:
        return
    states = snapshot.documents[DATA_FILE]["ranks"]
    # A rank that the saved world did not have is given another's, which the loader refuses, as every rank's then does.
    rank = min(job.ddp.rank, len(states) - 1)
    own = decode(states[rank], lambda name: snapshot.tensors[DATA_FILE][f"{rank}/{name}"].clone())
    job.loader.load_state_dict(own)
