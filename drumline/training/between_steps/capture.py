"""What a checkpoint of a run holds: the state of the job, of its hooks, and of every rank, gathered
on the ranks that write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from drumline.checkpoint import state
from drumline.checkpoint.optimizer_state import encode_state
from drumline.checkpoint.rank_states import gather_states
from drumline.checkpoint.state import gather_rng
from drumline.checkpoint.store import Snapshot
from drumline.checkpoint.writer import CapturedState
from drumline.rank.collectives import all_sum
from drumline.training.between_steps.task_hooks import TaskHooks
from drumline.training.job.job import Job, Progress
from drumline.training.job.optimizer import group_state
from drumline.training.replica_state import OUTER_FILE, REPLICAS_FILE, replica_state

DATA_FILE = "data"
"""The file and document of a dataset's own state."""
COMM_FILE = "comm"
"""The file and document of `Job.comm`."""
_STATE_NAMES = {DATA_FILE: "the state_dict() of the training data"}


def capture_run(
    job: Job,
    progress: Progress,
    facts: Mapping[str, Any],
    hooks: TaskHooks | None = None,
    *,
    is_writer: bool,
) -> CapturedState | None:
    """Collective: what the writing ranks need for a checkpoint; None on the others. Only rank 0's
    is complete. All ranks already have rank 0's buffers; with `--dist.sync` copy what it returns in
    `job.shared_weights()`.

    With a single rank this does not wait for its GPU."""
    device = job.ddp.device
    rng = gather_rng(device)
    by_rank = _gather_rank_states(job)
    # Being copied to the host: complete when a copy that is started later is.
    sums = all_sum(job.meter.peek()).to("cpu", non_blocking=device.type == "cuda")
    of_run: dict[str, Any] = {}
    of_hooks = Snapshot({}, {})
    if hooks is not None:  # on every rank: both calls may be collective
        of_run["stop_asked"] = hooks.pending_reason()
        of_run["stopped"] = progress.stopped
        of_run["metrics"] = progress.metrics
        of_hooks = hooks.capture()
    if not is_writer:
        return None
    measured: dict[str, Any] = {"names": job.meter.names}
    document = {
        "step": progress.step,
        "cursor": asdict(progress.cursor),
        "saved_step": progress.saved_step,
        "measured": measured,
        "facts": dict(facts),
        "group_state": group_state(job.optimizer, job.group_settings),
        **of_run,
    }
    snapshot = state.capture(job.model, job.optimizer, scaler=job.scaler, progress=document)
    live = {**snapshot.tensors, **of_hooks.tensors}
    if job.sync is not None and (outer := job.sync.outer_state()):
        live[OUTER_FILE] = outer
    return CapturedState(
        progress.step,
        live=live,
        frozen={"rng": rng, **by_rank.tensors},
        documents={**snapshot.documents, **of_hooks.documents, **by_rank.documents},
        complete=lambda: measured.update(sums=sums.tolist()),
    )


def _gather_rank_states(job: Job) -> Snapshot:
    """Collective: every rank's state of what has one of its own: a dataset that keeps its position,
    PowerSGD, a replica of `--dist.sync`."""
    gathered = Snapshot({}, {})
    comm = None if job.comm is None else job.comm.state_dict()
    states = {
        DATA_FILE: job.loader.stream_state(),
        COMM_FILE: comm,
        REPLICAS_FILE: replica_state(job),
    }
    for file, rank_state in states.items():
        if rank_state is None:
            continue
        tensors: dict[str, Tensor] = {}
        encoded = encode_state(rank_state, _STATE_NAMES.get(file, file), tensors)
        gathered.documents[file], tensors_by_rank = gather_states(encoded, tensors)
        if tensors_by_rank:
            gathered.tensors[file] = tensors_by_rank
    return gathered
