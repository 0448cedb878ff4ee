"""What a rank keeps in memory when the group of nodes changes (`--dist.on_lost_node continue`), and
how the next group continues from it.

All ranks of the next group compare how far they are. The furthest one is the source: a node that
joins gets the run's state from it, and a replica that did not see the end of a round the shared
weights. Nothing is read from a disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drumline.base.errors import TrainingError, UsageError
from drumline.base.text import duration, join_names
from drumline.checkpoint import state
from drumline.checkpoint.state import capture_rng, restore_rng
from drumline.checkpoint.store import Snapshot
from drumline.data.sharding import Cursor
from drumline.parallel.outer_sync import OuterSync
from drumline.parallel.shards import like_shard, own_part, sharded_parameters
from drumline.rank.collectives import gather_json
from drumline.rank.rendezvous.node_group import NodeGroup
from drumline.runs import catalog
from drumline.training.between_steps.saver import Saver
from drumline.training.job.job import Job, Progress
from drumline.training.job.optimizer import group_state
from drumline.training.manager import DDPManager
from drumline.training.replica_state import OUTER_FILE
from drumline.training.resume import use_own_settings
from drumline.training.run_context import RunContext

SHARED_FILES = ("model", OUTER_FILE)


@dataclass(frozen=True)
class KeptState:
    """Of one rank, on the host."""

    progress: Progress
    facts: Mapping[str, Any]
    snapshot: Snapshot
    """The shared weights, this rank's optimizer, hooks and progress."""
    own: dict[str, Any]
    """What its replica has to itself."""
    pending: list[int]
    rng: Tensor
    ledger: Mapping[str, Any]
    """Since the last save: `first` step, its `cursor`, `entries`, and how batches were split
    (`sharding`)."""
    left_at: float = field(default_factory=time.monotonic)

    def release(self) -> None:
        """The group trains: free the tensors. When it ends, its ranks keep what they have then."""
        self.snapshot.tensors.clear()
        self.own.clear()


@dataclass(frozen=True)
class Meeting:
    """What the ranks of the next group have found out about each other."""

    states: list[Mapping[str, Any] | None]
    """By rank; None: it has just joined."""
    num_shards: int
    """How many ranks hold one model: rank r has what the rank r + num_shards has. 1: each has a
    whole one."""

    def source_of(self, rank: int) -> int:
        """The rank that is furthest among those that hold the same."""
        states = [(-other, one) for other, one in enumerate(self.states) if one is not None]
        known = [((one["finished_at"], one["step"]), other) for other, one in states]
        same = [
            (place, other)
            for place, other in known
            if -other % self.num_shards == rank % self.num_shards
        ]
        if not same or max(same)[0] < max(known)[0]:
            raise TrainingError(
                f"shard {rank % self.num_shards} of step {max(known)[0][1]} is lost: no node has it",
                next_step="nothing: the launchers restart all ranks from the newest checkpoint",
            )
        return -max(same)[1]

    @property
    def furthest(self) -> Mapping[str, Any]:
        found = self.states[self.source_of(0)]
        assert found is not None
        return found

    @property
    def progress(self) -> Progress:
        at = self.furthest
        return Progress(at["step"], Cursor(**at["cursor"]), at["saved_step"], metrics=at["metrics"])

    def check_replica(self, ranks: Sequence[int]) -> None:
        """Refuse to continue with a replica that one of these ranks has updated in its last step
        and another has not: each of them has its own copy of the weights."""
        states = [self.states[rank] for rank in ranks]
        steps = sorted({state["step"] for state in states if state is not None})
        if len(steps) > 1:
            raise TrainingError(
                f"{join_names([f'rank {rank}' for rank in ranks])} train one replica, and have left it at the steps "
                f"{join_names([str(step) for step in steps])}",
                next_step="nothing: their launcher starts them again, and they join the other nodes",
            )

    def lacks(self, rank: int) -> str:
        """What this rank needs from its source: `all`, the `shared` weights, or nothing."""
        mine = self.states[rank]
        if mine is not None and mine["finished_at"] == self.furthest["finished_at"]:
            return ""
        return "all" if mine is None or self.num_shards > 1 else "shared"


def check_continues(job: Job) -> None:
    """Refuse what could not continue without a node."""
    size = job.ddp.local_world_size
    if job.sharded is not None and job.sharded.plan.num_shards != size:
        raise UsageError(
            f"--dist.on_lost_node continue needs a whole model on each node, and {job.sharded.plan.num_shards} ranks "
            f"hold one, with {size} on a node",
            next_step=f"set --dist.shard_ranks {size}, or leave it out; or --dist.on_lost_node restart",
        )
    if job.loader.stream_state() is not None:
        raise UsageError(
            "--dist.on_lost_node continue cannot give a lost node's samples to the others: the training data is a "
            "stream with a state of its own on each rank",
            next_step="use data with indices, or a plain iterable; or --dist.on_lost_node restart",
        )


def keep_state(context: RunContext, facts: Mapping[str, Any], saver: Saver) -> KeptState:
    """Not collective: other ranks are lost."""
    job = context.job
    progress = context.progress
    sync = context.job.sync
    # Sharded replicas are the same after every step.
    own: dict[str, Any] = {"finished_at": [progress.step]} if sync is None else sync.own_state()
    rng = capture_rng(job.ddp.device)
    with job.shared_weights():
        of_hooks = Snapshot({}, {}) if context.hooks is None else context.hooks.capture()
        snapshot = state.capture(
            job.model,
            job.optimizer,
            scaler=job.scaler,
            progress={
                "group_state": group_state(job.optimizer, job.group_settings),
                "measured": {"sums": job.meter.peek().tolist(), "names": job.meter.names},
                "stop_asked": None if context.hooks is None else context.hooks.run.stop_reason,
            },
        )
        live = {
            **snapshot.tensors,
            **of_hooks.tensors,
            OUTER_FILE: {} if sync is None else sync.outer_state(),
        }
        tensors = {
            file: {name: own_part(one).detach().cpu().clone() for name, one in some.items()}
            for file, some in live.items()
        }
    return KeptState(
        progress=replace(progress),
        facts=dict(facts),
        # As JSON, which is copied, and is what another rank would get.
        snapshot=Snapshot(
            dict(tensors), json.loads(json.dumps({**snapshot.documents, **of_hooks.documents}))
        ),
        own=own,
        pending=[]
        if sync is None
        else sync.pending(progress.step, is_last=progress.step >= context.total_steps),
        rng=rng,
        ledger=saver.unsaved(),
    )


def meet(kept: KeptState | None, ddp: DDPManager, *, is_sharded: bool) -> Meeting:
    """Collective: compare how far the ranks of this group are. `is_sharded`: the ranks of a node
    hold one model."""
    mine = None
    if kept is not None:
        at = kept.progress
        mine = {
            "step": at.step,
            "cursor": asdict(at.cursor),
            "saved_step": at.saved_step,
            "metrics": at.metrics,
            "finished_at": kept.own["finished_at"],
            "pending": kept.pending,
            "ledger": kept.ledger,
            "facts": kept.facts,
        }
    return Meeting(gather_json(mine, device=ddp.device), ddp.local_world_size if is_sharded else 1)


def check_newest(root: Path, meeting: Meeting) -> None:
    """On rank 0: refuse to continue from memory where others have continued, and saved, without
    this group, as after a node was stopped for a while."""
    step = meeting.progress.step
    if max(catalog.list_steps(root), default=0) <= step:
        return
    path, _ = catalog.newest_valid(root)
    saved = 0 if path is None else catalog.read_document(path, "progress")["step"]
    if saved > step:
        raise TrainingError(
            f"the run is at step {saved} in {root}, and this node at step {step}: the others continued without it",
            next_step="nothing: its launcher starts it again, and it resumes from there",
        )


def restore_kept(context: RunContext, meeting: Meeting, kept: KeptState | None) -> None:
    """Collective: continue with the job that was built for this group, and repeat a round that did
    not end."""
    job = context.job
    snapshot = _as_shards(_send_what_is_lacking(meeting, kept, job), job)
    saved = state.restore(snapshot, job.model, job.optimizer, scaler=job.scaler)
    use_own_settings(job, saved.get("group_state"))
    progress = meeting.progress
    for name in ("step", "cursor", "saved_step", "metrics"):
        setattr(context.progress, name, getattr(progress, name))
    job.loader.cursor = progress.cursor
    if context.hooks is not None:
        context.hooks.restore(snapshot)
        context.hooks.run.stop_reason = saved.get("stop_asked")
    if kept is not None:
        # Its own, not those of the rank that it may have got the shards from.
        job.meter.put(**kept.snapshot.documents["progress"]["measured"])
        restore_rng(kept.rng, job.ddp.device)
    if job.sync is not None:
        _restore_replica(context, job.sync, meeting, kept, snapshot.tensors.get(OUTER_FILE, {}))


def _restore_replica(
    context: RunContext,
    sync: OuterSync,
    meeting: Meeting,
    kept: KeptState | None,
    outer: Mapping[str, Tensor],
) -> None:
    rank = context.job.ddp.rank
    furthest = meeting.furthest
    meeting.check_replica(sync.groups.members)
    sync.load_outer_state(outer)
    sync.load_own_state(None if kept is None else kept.own, furthest["finished_at"])
    contributors = [other for other, one in enumerate(meeting.states) if one is not None]
    if furthest["pending"]:
        weight = len(sync.groups.members) / len(contributors) if rank in contributors else 0.0
        step = context.progress.step
        sync.repeat(furthest["pending"], step, weight=weight, is_last=step >= context.total_steps)


def report_regrouped(context: RunContext, group: NodeGroup, kept: KeptState | None) -> None:
    """After the first step of a group: who was lost or joined, and for how long this rank was
    paused."""
    paused_s = None if kept is None else time.monotonic() - kept.left_at
    step = context.progress.step - 1
    texts = []
    if gone := [one for one in group.lost if one not in group.joined]:
        verb = "was" if len(gone) == 1 else "were"
        texts.append(f"{join_names(gone)} {verb} lost by step {step}; the others continue")
    if group.joined:
        again = "joined" if not set(group.joined) & set(group.lost) else "was lost and joined again"
        texts.append(
            f"{join_names(list(group.joined))} {again} after step {step}, from the memory of the others"
        )
    texts = texts or [
        f"the same nodes continue after step {step}: a connection between them was lost"
    ]
    paused = "" if paused_s is None else f" (paused {duration(paused_s)})"
    context.reporter.report(
        "regrouped",
        step=step,
        lost=list(group.lost),
        joined=list(group.joined),
        nodes=[str(one) for one in group.members],
        seconds=paused_s,
        message=f"{'; '.join(texts)}{paused}",
    )


def _send_what_is_lacking(meeting: Meeting, kept: KeptState | None, job: Job) -> Snapshot:
    """Collective: from its source to each rank that lacks something, one after the other."""
    rank = job.ddp.rank
    snapshot = None if kept is None else kept.snapshot
    device = job.ddp.device if job.ddp.backend == "nccl" else torch.device("cpu")
    for other in range(len(meeting.states)):
        source = meeting.source_of(other)
        if not (what := meeting.lacks(other)) or rank not in (other, source):
            continue
        if rank == source:
            assert snapshot is not None
            files = {
                name: some
                for name, some in snapshot.tensors.items()
                if what == "all" or name in SHARED_FILES
            }
            documents = snapshot.documents if what == "all" else {}
            _transfer(Snapshot(files, documents), other, device)
        else:
            received = _transfer(None, source, device)
            mine = snapshot or Snapshot({}, {})
            snapshot = Snapshot(
                {**mine.tensors, **received.tensors}, {**mine.documents, **received.documents}
            )
    assert snapshot is not None
    return snapshot


def _as_shards(snapshot: Snapshot, job: Job) -> Snapshot:
    """What belongs to a sharded parameter and has the shape of this rank's part (weights, an
    optimizer's state) as a shard."""
    parameters = {} if job.sharded is None else sharded_parameters(job.model)

    def shard(name: str, part: Tensor) -> Tensor:
        parameter = next(
            (parameters[word] for word in (name, *name.split("/")) if word in parameters), None
        )
        if parameter is None or own_part(parameter).shape != part.shape:
            return part
        return like_shard(parameter, part.to(own_part(parameter).device))

    tensors = {
        file: {name: shard(name, one) for name, one in some.items()}
        for file, some in snapshot.tensors.items()
    }
    return Snapshot(dict(tensors), snapshot.documents)


def _transfer(given: Snapshot | None, peer: int, device: torch.device) -> Snapshot:
    """Send what is `given` to that rank; None: receive it from there."""
    move: Callable[[Tensor, int], Any] = dist.recv if given is None else dist.send
    shapes = {
        file: {
            name: [str(one.dtype).removeprefix("torch."), list(one.shape)]
            for name, one in some.items()
        }
        for file, some in ({} if given is None else given.tensors).items()
    }
    text = bytearray(json.dumps([shapes, None if given is None else given.documents]).encode())
    move(size := torch.tensor([len(text)], device=device), peer)
    encoded = torch.frombuffer(text if given else bytearray(int(size)), dtype=torch.uint8).to(
        device
    )
    move(encoded, peer)
    shapes, documents = json.loads(encoded.cpu().numpy().tobytes())
    tensors: dict[str, dict[str, Tensor]] = {file: {} for file in shapes}
    for file, name in [(file, name) for file, some in shapes.items() for name in some]:
        dtype, shape = shapes[file][name]
        if given is None:
            one = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        else:
            one = given.tensors[file][name].to(device).contiguous()
        if one.numel():
            move(one.reshape(-1).view(torch.uint8), peer)
        if given is None:  # who sends needs no second copy in memory
            tensors[file][name] = one.cpu()
    return Snapshot(dict(tensors), documents)
