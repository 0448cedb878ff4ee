"""What a rank keeps in memory when the group of nodes changes (`--dist.on_lost_node continue`), and
how the next group continues from it.

All ranks of the next group compare how far they are. The furthest one is the source: a node that
joins gets the run's state from it, and a replica that did not see the end of a round the shared
weights. Nothing is read from a disk.

    keep_state        each rank by itself: a copy of its state on the host; then the job and the group are freed
    compare_group     in the next group, before the job is built: how far each rank is
    restore_kept      when it is built: each rank gets what it lacks, and a round that did not end is repeated
    report_regrouped  after the first step: who was lost or joined
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.base.errors import TrainingError, UsageError
from drumline.base.text import duration, join_names
from drumline.checkpoint import state
from drumline.checkpoint.store import Snapshot, broadcast
from drumline.data.sharding import Cursor
from drumline.parallel.outer_sync import OuterSync
from drumline.parallel.shards import like_shard, own_part, sharded_parameters
from drumline.rank.collectives import gather_json
from drumline.rank.determinism import capture_rng, restore_rng
from drumline.rank.rendezvous.node_group import NodeGroup
from drumline.runs import catalog
from drumline.training.between_steps.saver import Saver, live_state
from drumline.training.job.job import Job, Progress
from drumline.training.manager import RunManager
from drumline.training.replica_state import OUTER_FILE
from drumline.training.resume import use_own_settings
from drumline.training.run_context import RunContext, RunFacts

SHARED_FILES = {"model", OUTER_FILE}


@dataclass(frozen=True)
class KeptState:
    """What the next group needs of one rank, on the host."""

    position: dict[str, Any]
    """What all ranks of the next group get, as JSON: how far this one is (`step`, `cursor`,
    `saved_step`, `metrics`), the rounds that its replica has finished and that are `pending`, what
    it has trained on since the last save (the `ledger`: `Saver.unsaved`), and the run's `facts`."""

    snapshot: Snapshot
    """The shared weights, this rank's optimizer, hooks and progress."""

    replica: dict[str, Any]
    """What its replica has to itself."""

    rng: Tensor
    """The state of its random numbers."""

    left_at: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""

    def release(self) -> None:
        """The group trains: free the tensors. When it ends, its ranks keep what they have then."""
        self.snapshot.tensors.clear()
        self.replica.clear()


@dataclass(frozen=True)
class GroupState:
    """How far the ranks of the next group are, and who has what. The same on every rank, so that
    all of them decide alike."""

    positions: Mapping[int, Mapping[str, Any]]
    """Of each rank that was in the group before (`KeptState.position`), in their order; the others
    have just joined."""

    num_shards: int
    """How many ranks hold one model: rank r has what the rank r + num_shards has. 1: each has a
    whole one."""

    def source_of(self, rank: int) -> int:
        """The rank that is furthest among those that hold the same shard; the lowest of equals."""
        shard = rank % self.num_shards
        furthest = max(map(self._rounds_and_step, self.positions))

        for peer in self.positions:
            if peer % self.num_shards == shard and self._rounds_and_step(peer) == furthest:
                return peer

        _, step = furthest
        raise TrainingError(
            f"shard {shard} of step {step} is lost: no node has it",
            next_step="nothing: the launchers restart all ranks from the newest checkpoint",
        )

    def _rounds_and_step(self, rank: int) -> tuple[list[int], int]:
        """The rounds that the rank has finished, and its step."""
        position = self.positions[rank]
        return position["finished_at"], position["step"]

    @property
    def furthest(self) -> Mapping[str, Any]:
        """The position of the rank that is furthest: the run continues from there."""
        return self.positions[self.source_of(0)]

    @property
    def facts(self) -> RunFacts:
        """What the run's checkpoints record (`RunFacts`), a copy."""
        return dict(self.furthest["facts"])

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        position = self.furthest
        return Progress(
            position["step"],
            Cursor(**position["cursor"]),
            position["saved_step"],
            metrics=position["metrics"],
        )

    def check_replica(self, ranks: Sequence[int]) -> None:
        """Refuse to continue with a replica that one of these ranks has updated in its last step
        and another has not: each of them has its own copy of the weights."""
        steps = {self.positions[rank]["step"] for rank in ranks if rank in self.positions}
        if len(steps) > 1:
            raise TrainingError(
                f"{join_names(f'rank {rank}' for rank in ranks)} train one replica, and have left it at the steps "
                f"{join_names(sorted(steps))}",
                next_step="nothing: their launcher starts them again, and they join the other nodes",
            )

    def lacks(self, rank: int) -> str:
        """What this rank needs from its source: `all`, the `shared` weights, or nothing. A rank
        that has just joined has nothing yet."""
        if rank not in self.positions:
            return "all"
        if self.positions[rank]["finished_at"] == self.furthest["finished_at"]:
            return ""
        return "all" if self.num_shards > 1 else "shared"


def check_continues(job: Job) -> None:
    """Refuse what could not continue without a node: a model that several nodes hold together, and
    data whose position is on one node alone."""
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


def keep_state(context: RunContext, facts: RunFacts, saver: Saver) -> KeptState:
    """What this rank has when its group ends. Not collective: other ranks are lost. It is copied to
    the host, since the tensors of the job are freed with it."""
    job = context.job
    progress = context.progress
    rng = capture_rng(job.ddp.device)

    # Sharded replicas are the same after every step.
    replica: dict[str, Any] = {"finished_at": [progress.step]}
    pending: list[int] = []
    if job.sync is not None:
        replica = job.sync.own_state()
        pending = job.sync.pending(progress.step, is_last=progress.step >= context.total_steps)

    position = {
        "step": progress.step,
        "cursor": asdict(progress.cursor),
        "saved_step": progress.saved_step,
        "metrics": progress.metrics,
        "finished_at": replica["finished_at"],
        "pending": pending,
        "ledger": saver.unsaved(),
        "facts": facts,
    }

    return KeptState(position, _copy_to_host(context), replica, rng)


def _copy_to_host(context: RunContext) -> Snapshot:
    """What the rank would save, and what only it has measured, in the host's memory."""
    job = context.job
    progress = {
        "measured": {"sums": job.meter.peek().tolist(), "names": job.meter.names},
        "stop_asked": context.hooks.run.stop_reason,
    }

    copies: dict[str, Mapping[str, Tensor]] = {}
    with job.shared_weights():
        snapshot = live_state(job, context.hooks, progress)
        for file, tensors in snapshot.tensors.items():
            copies[file] = {
                name: own_part(tensor).detach().cpu().clone() for name, tensor in tensors.items()
            }

    # As JSON, which is copied, and is what another rank would get.
    return Snapshot(copies, json.loads(json.dumps(snapshot.documents)))


def compare_group(kept_state: KeptState | None, ddp: RunManager, *, is_sharded: bool) -> GroupState:
    """Collective: how far the ranks of this group are. `is_sharded`: the ranks of a node hold one
    model, so a rank can only get its shard from the same rank of another node."""
    gathered = gather_json(None if kept_state is None else kept_state.position)
    positions = {rank: position for rank, position in enumerate(gathered) if position is not None}
    return GroupState(positions, ddp.local_world_size if is_sharded else 1)


def check_newest(root: Path, group: GroupState) -> None:
    """On rank 0: refuse to continue from memory where others have continued, and saved, without
    this group, as after a node was stopped for a while."""
    step = group.progress.step
    if max(catalog.list_steps(root), default=0) <= step:
        return

    path, _ = catalog.newest_valid(root)
    saved = 0 if path is None else catalog.read_document(path, "progress")["step"]
    if saved > step:
        raise TrainingError(
            f"the run is at step {saved} in {root}, and this node at step {step}: the others continued without it",
            next_step="nothing: its launcher starts it again, and it resumes from there",
        )


def restore_kept(context: RunContext, group: GroupState, kept_state: KeptState | None) -> None:
    """Collective: continue with the job that was built for this group, and repeat a round that did
    not end. `kept_state`: None on a rank that has just joined."""
    job = context.job
    snapshot = _as_shards(_send_what_is_lacking(group, kept_state, job), job)
    saved = state.restore(snapshot, job.model, job.optimizer, scaler=job.scaler)
    use_own_settings(job, saved.get("group_state"))

    progress = group.progress
    context.progress.step = progress.step
    context.progress.cursor = progress.cursor
    context.progress.saved_step = progress.saved_step
    context.progress.metrics = progress.metrics

    job.loader.cursor = progress.cursor
    context.hooks.restore(snapshot)
    context.hooks.run.stop_reason = saved.get("stop_asked")

    if kept_state is not None:
        # Its own, not those of the rank that it may have got the shards from.
        job.meter.put(**kept_state.snapshot.documents["progress"]["measured"])
        restore_rng(kept_state.rng, job.ddp.device)

    if job.sync is not None:
        job.sync.load_outer_state(snapshot.tensors.get(OUTER_FILE, {}))
        _restore_replica(context, job.sync, group, kept_state)


def _restore_replica(
    context: RunContext, sync: OuterSync, group: GroupState, kept_state: KeptState | None
) -> None:
    """Collective: what this rank's replica has to itself, and a round that did not end."""
    group.check_replica(sync.groups.members)
    furthest = group.furthest
    replica = None if kept_state is None else kept_state.replica
    sync.load_own_state(replica, furthest["finished_at"])
    if not furthest["pending"]:
        return

    has_state = kept_state is not None
    weight = len(sync.groups.members) / len(group.positions) if has_state else 0.0
    step = context.progress.step
    sync.repeat(furthest["pending"], step, weight=weight, is_last=step >= context.total_steps)


def report_regrouped(context: RunContext, group: NodeGroup, kept_state: KeptState | None) -> None:
    """After the first step of a group: who was lost or joined, and for how long this rank was
    paused.

        {"kind": "regrouped", "step": 120, "lost": ["gpu-02"], "joined": [], "nodes": ["gpu-01", "gpu-03"],
         "seconds": 1.4, "message": "gpu-02 was lost by step 120; the others continue (paused 1.4 s)"}
    """
    step = context.progress.step - 1
    message = _describe_change(group, step)
    paused_s = None
    if kept_state is not None:
        paused_s = time.monotonic() - kept_state.left_at
        message += f" (paused {duration(paused_s)})"

    context.reporter.report(
        "regrouped",
        step=step,
        lost=list(group.lost),
        joined=list(group.joined),
        nodes=[str(node) for node in group.members],
        seconds=paused_s,
        message=message,
    )


def _describe_change(group: NodeGroup, step: int) -> str:
    """`gpu-02 was lost by step 120; the others continue`."""
    texts = []
    lost = [node for node in group.lost if node not in group.joined]
    if lost:
        verb = "was" if len(lost) == 1 else "were"
        texts.append(f"{join_names(lost)} {verb} lost by step {step}; the others continue")

    if group.joined:
        texts.append(
            f"{join_names(group.joined)} joined after step {step}, from the memory of the others"
        )

    if not texts:
        return f"the same nodes continue after step {step}: a connection between them was lost"

    return "; ".join(texts)


def _send_what_is_lacking(group: GroupState, kept_state: KeptState | None, job: Job) -> Snapshot:
    """Collective: from its source to each rank that lacks something. All others take part, so that
    several get it at once."""
    rank = job.ddp.rank
    snapshot = Snapshot({}, {}) if kept_state is None else kept_state.snapshot
    peers = range(job.ddp.world_size)

    needs = [(group.source_of(peer), group.lacks(peer)) for peer in peers]
    for source, lacking in sorted(set(needs)):
        if not lacking:
            continue

        sent = None
        if rank == source:
            sent = snapshot
            if lacking == "shared":
                shared = snapshot.tensors.keys() & SHARED_FILES
                sent = Snapshot({file: snapshot.tensors[file] for file in sorted(shared)}, {})

        is_for_this_rank = needs[rank] == (source, lacking)
        received = broadcast(sent, source=source, keeps=is_for_this_rank)
        if is_for_this_rank:
            snapshot = Snapshot(
                {**snapshot.tensors, **received.tensors},
                {**snapshot.documents, **received.documents},
            )

    return snapshot


def _as_shards(snapshot: Snapshot, job: Job) -> Snapshot:
    """What belongs to a sharded parameter and has the shape of this rank's part (weights, an
    optimizer's state) as a shard."""
    if job.sharded is None:
        return snapshot

    parameters = sharded_parameters(job.model)

    def shard(name: str, part: Tensor) -> Tensor:
        """The tensor of this name, as a shard if its parameter is one."""
        names = [owner for owner in (name, *name.split("/")) if owner in parameters]
        if not names:
            return part

        parameter = parameters[names[0]]
        if own_part(parameter).shape != part.shape:
            return part
        return like_shard(parameter, part.to(own_part(parameter).device))

    shards: dict[str, Mapping[str, Tensor]] = {}
    for file, tensors in snapshot.tensors.items():
        shards[file] = {name: shard(name, tensor) for name, tensor in tensors.items()}

    return Snapshot(shards, snapshot.documents)
