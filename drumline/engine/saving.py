"""Between a running job and its checkpoints: what is gathered for one, and how all ranks start from one.

Rank 0 reads; the others get what they need over collectives, so that only rank 0 needs the folder. How a checkpoint is
written is told in `saver`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.checkpoint import look, state, store
from drumline.checkpoint.manifest import TornCheckpointError
from drumline.checkpoint.rng import CorruptRandomStateError, capture_rng, check_rng, restore_rng
from drumline.data.sharding import Cursor
from drumline.distributed.collectives import (
    all_sum,
    broadcast_json,
    broadcast_tensors,
    gather_tensors,
)
from drumline.engine.data_state import gather_data_state, restore_data_state, tensor_files
from drumline.engine.job import Job
from drumline.engine.optimizer import OPTIMIZERS
from drumline.errors import CheckpointError, CheckpointMismatchError, OptimizerMismatchError
from drumline.manager import DDPManager
from drumline.watch.beats.phase import Phase


@dataclass
class Progress:
    """How far a run has come. Changed by the loop alone; everyone may look."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    saved_step: int | None = None
    """Of the newest checkpoint that this start has begun to write; None: none yet."""


@dataclass(frozen=True)
class State:
    """What a checkpoint is to hold."""

    live: dict[str, dict[str, Tensor]]
    """Shares memory with the model and the optimizer: the next step changes it."""
    own: dict[str, dict[str, Tensor]]
    """Of this save alone."""
    documents: dict[str, Any]
    """Not yet with `sums` in them."""
    sums: Tensor
    """Of the meter, on their way to the host: there when a copy that was begun after them is."""

    def all_documents(self) -> dict[str, Any]:
        """What the files hold, once the sums have come."""
        progress = self.documents["progress"]
        measured = {**progress["measured"], "sums": self.sums.tolist()}
        return {**self.documents, "progress": {**progress, "measured": measured}}


def gather_state(job: Job, progress: Progress, facts: Mapping[str, Any], *, is_writer: bool) -> State | None:
    """Collective: what the ranks that write need for a checkpoint; None on the others. Only rank 0's is complete. The
    ranks have rank 0's buffers already.

    One rank alone does not wait for its GPU here."""
    device = job.ddp.device
    rng = gather_tensors(capture_rng(device), device=device)
    data = gather_data_state(job)
    sums = all_sum(job.meter.peek()).to("cpu", non_blocking=device.type == "cuda")
    if not is_writer:
        return None
    snapshot = state.capture(
        job.model,
        job.optimizer,
        scaler=job.scaler,
        progress={**asdict(progress), "measured": {"names": job.meter.names}, "facts": dict(facts)},
    )
    generators = {_rank_name(rank): draws for rank, draws in enumerate(rng)}
    documents = {**snapshot.documents, **data.documents}
    return State(snapshot.tensors, {"rng": generators, **data.tensors}, documents, sums)


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole and finite, and newer ones that were skipped, each with the reason."""

    path: Path
    facts: dict[str, Any]
    progress: Progress
    """How far the run was when it was saved."""
    skipped: list[tuple[Path, str]]
    non_finite: str | None
    """Where no checkpoint is finite: a tensor of this one that is not."""


_FACTS = {"task": str, "config": dict, "world_size": int, "batch_size": int}


def find_newest(ddp: DDPManager, root: Path) -> Found | None:
    """Collective: what the run goes on from. None: it begins."""
    answer: Any = None
    if ddp.is_main_process():
        path, skipped = look.newest_valid(root, _check_contents)
        saved = None if path is None else look.read_document(path, "progress")
        non_finite = None if path is None else look.glance(path).non_finite
        answer = [str(path or ""), saved, [(str(one), reason) for one, reason in skipped], non_finite]
    path, saved, skipped, non_finite = broadcast_json(answer, device=ddp.device)
    if skipped and not path:
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {root} is whole; the newest: {skipped[0][1]}",
            next_step="bring one back from a backup, or start anew with --fresh, which keeps what is there",
        )
    if not path:
        return None
    progress = Progress(saved["step"], Cursor(**saved["cursor"]))
    named = [(Path(one), reason) for one, reason in skipped]
    return Found(Path(path), saved["facts"], progress, named, non_finite)


def _check_contents(path: Path) -> None:
    """What the checksums do not show: whoever wrote them may have written anything."""
    found = store.read(path)
    documents = [found.documents.get(name) for name in ("model", "optimizer", "progress")]
    if not {"model", "optimizer", "rng"} <= found.tensors.keys() or not all(map(_is_dict, documents)):
        raise TornCheckpointError(path, "it does not hold a model, an optimizer, random states and progress")
    saved = found.documents["progress"]
    facts, cursor = saved.get("facts"), saved.get("cursor")
    is_whole = (
        _is_dict(facts)
        and all(type(facts.get(name)) is kind for name, kind in _FACTS.items())
        and str(facts["config"].get("optim.name")) in OPTIMIZERS
        and _is_dict(cursor)
        and cursor.keys() == {"epoch", "position"}
        and all(
            type(count) is int and 0 <= count < 1 << 62 for count in (saved.get("step"), *cursor.values())
        )
        and saved["step"] == look.glance(path).step
    )
    if not is_whole:
        raise TornCheckpointError(path, "progress.json does not say where the run was")
    try:
        for generators in found.tensors["rng"].values():
            check_rng(generators)
    except CorruptRandomStateError as error:
        raise TornCheckpointError(path, f"rng.safetensors: {error.reason}") from error


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def restore(job: Job, path: Path, *, with_optimizer: bool = True) -> None:
    """Collective: put the job back to where a checkpoint was taken. `with_optimizer=False`: its optimizer stays new."""
    job.ddp.beat.mark(Phase.START)
    device = job.ddp.device
    read = store.read(path) if job.ddp.is_main_process() else None
    documents = broadcast_json(None if read is None else read.documents, device=device)
    tensors = {
        name: broadcast_tensors(None if read is None else read.tensors[name], device=device)
        for name in ("model", "optimizer", "rng", *tensor_files(documents))
    }
    restore_data_state(job, store.Snapshot(tensors, documents))
    optimizer = job.optimizer if with_optimizer else None
    own_settings = [_settings_of(group) for group in job.optimizer.param_groups]
    # An earlier version saved the name in the settings only.
    name = documents["progress"]["facts"]["config"]["optim.name"]
    documents["optimizer"].setdefault("class", OPTIMIZERS[name].__name__)
    try:
        saved = state.restore(store.Snapshot(tensors, documents), job.model, optimizer, scaler=job.scaler)
    except CheckpointMismatchError as error:
        error.next_step = f"{error.next_step}, or {_way_out(error)}"
        raise
    for group, own in zip(job.optimizer.param_groups, own_settings, strict=True):
        group.update(own)  # what the checkpoint says of them may be of other settings
    # A rank that the saved world did not have keeps the stream that it was just seeded with.
    if (generators := tensors["rng"].get(_rank_name(job.ddp.rank))) is not None:
        restore_rng(generators, device)
    if job.ddp.is_main_process() and "measured" in saved:
        with state.translated("progress"):
            job.meter.put(**saved["measured"])


def _way_out(error: CheckpointMismatchError) -> str:
    if isinstance(error, OptimizerMismatchError):
        return "start the optimizer anew and keep the weights with --optim.reset"
    return "start a new run: --fresh moves this one aside, --run DIR trains in another folder"


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the user chose; the rate is set before each step."""
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"
