"""What replicas add to a run: rounds after steps (`--dist.sync`), steps that the others repeat when
a node is lost (`--dist.on_lost_node continue`), and every replica's state in checkpoints.

A checkpoint's model and optimizer are the shared weights and rank 0's optimizer, so that anything
can load it. Beside them, `outer` is what the outer optimizer knows, and `replicas` what each
replica has to itself.

    model, optimizer  the shared weights, rank 0's optimizer
    outer             the outer momentum; the shared weights, where the model's have fewer digits
    replicas          by leader: its own weights and buffers, its optimizer, and the rounds in progress
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drumline.base.errors import log
from drumline.checkpoint import state
from drumline.checkpoint.optimizer_state import load_optimizer_state, optimizer_state
from drumline.checkpoint.rank_states import sent_state
from drumline.checkpoint.store import Snapshot
from drumline.data.loader import Step
from drumline.metrics.meters import Meter
from drumline.parallel.outer_sync import OuterSync
from drumline.parallel.wrap import LiveBuffers
from drumline.rank.collectives import all_sum
from drumline.rank.rendezvous.live_nodes import LiveNodes
from drumline.training.job.job import Job
from drumline.training.run_context import RunContext
from drumline.training.steps.eager import AnyStep
from drumline.watch.heartbeat import BACKWARD

REPLICAS_FILE = "replicas"
OUTER_FILE = "outer"
_NOT_A_LEADER: dict[str, Any] = {"dict": []}


class StepState:
    """What a step changes before it updates the weights, kept at its beginning: buffers, modules'
    extra state, the sums of the next log line, and the state of random numbers.

    The weights, the optimizer and the loss scaler change in the update alone, and no rank begins
    that before all have their gradients. What belongs to the loop (its progress, the ledger, hooks)
    changes after the step."""

    def __init__(self, model: nn.Module, meter: Meter, device: torch.device) -> None:
        self._device = device
        self._buffers = LiveBuffers(model)
        self._modules = [
            module
            for module in model.modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

        self._meter = meter
        self._buffer_copies: list[Tensor] | None = None
        self._gpu_rng: Tensor | None = None

    def keep(self) -> None:
        """A step begins. Without waiting for the device; the copies are in the memory of the last
        ones."""
        self._buffer_copies = self._buffers.keep(self._buffer_copies)
        self._extra_states = [deepcopy(module.get_extra_state()) for module in self._modules]

        self._sums = self._meter.keep()
        self._host_weight = self._meter.host_weight

        # Not packed, as for a checkpoint: that takes longer, and this is in every step.
        self._torch_rng = torch.get_rng_state()
        if self._device.type == "cuda":
            self._gpu_rng = torch.cuda.get_rng_state(self._device)

        self._numpy_rng = np.random.get_state()
        self._python_rng = random.getstate()

    def restore(self) -> None:
        """The step has failed: all is as it was at `keep`."""
        assert self._buffer_copies is not None, "keep comes first"
        self._buffers.put_back(self._buffer_copies)
        for module, extra_state in zip(self._modules, self._extra_states, strict=True):
            module.set_extra_state(extra_state)

        self._meter.put_back(self._sums, self._host_weight)
        torch.set_rng_state(self._torch_rng)
        if self._gpu_rng is not None:
            torch.cuda.set_rng_state(self._gpu_rng, self._device)

        np.random.set_state(self._numpy_rng)
        random.setstate(self._python_rng)


def repeatable_step(inner: AnyStep, live: LiveNodes, job: Job) -> AnyStep:
    """A step that has changed nothing if it fails because a node is lost."""
    before = StepState(job.model, job.meter, job.ddp.device)

    def take(step: Step) -> None:
        """The step; if it fails with a lost node, everything is as it was before."""
        before.keep()
        try:
            inner(step)
        except RuntimeError as error:
            if live.is_lost(error):
                before.restore()
            raise

    return take


def synced_step(
    inner: AnyStep, sync: OuterSync, context: RunContext, live: LiveNodes | None
) -> AnyStep:
    """A step of a replica, and the rounds after it, which are collective. A node that is lost in
    its own step, or in a round, ends the group after this step."""
    progress = context.progress
    heartbeat = context.job.heartbeat

    # A replica of one rank needs nobody in its own steps.
    if live is not None and sync.groups.within is not None:
        inner = repeatable_step(inner, live, context.job)

    def take(step: Step) -> None:
        """The step, and the rounds after it."""
        inner(step)
        heartbeat.mark(BACKWARD)  # where the watchdog expects a rank to wait for others

        number = progress.step + 1
        is_last = number >= context.total_steps

        if live is None:
            sync.after_step(number, is_last=is_last)
        else:
            live.ends = _synchronize(sync, live, context, number, is_last=is_last)

    return take


def _synchronize(
    sync: OuterSync, live: LiveNodes, context: RunContext, number: int, *, is_last: bool
) -> bool:
    """Collective: the rounds after step `number`. Returns whether the group of nodes ends after it:
    one is lost, or joins. The step itself is done, and counts."""
    try:
        if live.is_broken:
            return True

        sync.after_step(number, is_last=is_last)
        has_finished_round = sync.finished_at[-1] + sync.plan.overlap == number
        if is_last or not has_finished_round:
            return False

        # All ranks at the same step, whenever each has heard of the node that waits.
        joiner = torch.tensor([float(live.has_joiner)], device=context.job.ddp.device)
        return bool(all_sum(joiner).item())
    except RuntimeError as error:
        if not live.is_lost(error):
            raise
        return True


def agreed_step(inner: AnyStep, live: LiveNodes, context: RunContext) -> AnyStep:
    """A step of replicas that reduce their gradients in every step, and continue without a lost
    node (hsdp): no rank updates its shards before all have their gradients, so a step that fails
    has changed nothing."""
    repeatable = repeatable_step(inner, live, context.job)
    progress = context.progress
    every = context.config.log.every_steps
    flag = torch.zeros(1, device=context.job.ddp.device)

    def vote(value: float) -> float:
        """Collective: the sum over all ranks."""
        return all_sum(flag.fill_(value)).item()

    def take(step: Step) -> None:
        """The step; at some of them the ranks agree whether to let a waiting node in."""
        repeatable(step)
        number = progress.step + 1
        try:
            if number % every == 0 and number < context.total_steps:
                live.ends = bool(vote(float(live.has_joiner)))
        except RuntimeError as error:  # the step is done, and counts
            if not live.is_lost(error):
                raise

        live.ends |= live.is_broken

    context.job.finite.agree = lambda: vote(0.0)
    return take


def replica_state(job: Job) -> dict[str, Any] | None:
    """Collective: what the leader of a replica saves. Rank 0's optimizer is in the checkpoint
    already; the other ranks of a replica save nothing."""
    if job.sync is None:
        return None

    replica = job.sync.state_dict()
    if job.sync.groups.across is None:
        return {}

    if job.ddp.rank > 0:
        tensors, document = optimizer_state(job.model, job.optimizer)
        replica["optimizer"] = {"tensors": tensors, "document": document}
        replica["scaler"] = None if job.scaler is None else job.scaler.state_dict()

    return replica


def restore_replica(
    job: Job,
    sync: OuterSync,
    snapshot: Snapshot,
    tensors: Mapping[str, Tensor] | None,
    *,
    with_optimizer: bool,
) -> None:
    """Collective: the job has been restored; add what its replica has to itself, from rank 0's
    `tensors`. A checkpoint of another number of replicas is given to them in turn."""
    with state.translated(REPLICAS_FILE):
        sync.load_outer_state(snapshot.tensors.get(OUTER_FILE, {}))
        ranks = snapshot.documents.get(REPLICAS_FILE, {"ranks": []})["ranks"]
        leaders = {
            rank: document for rank, document in enumerate(ranks) if document != _NOT_A_LEADER
        }

        source = list(leaders)[sync.groups.index % len(leaders)] if leaders else None
        replica = sent_state(leaders, source, tensors)
        if replica is not None:
            sync.load_state_dict(replica)
            if with_optimizer and replica.get("optimizer"):
                load_optimizer_state(job.model, job.optimizer, **replica["optimizer"])
            if job.scaler is not None and replica.get("scaler"):
                job.scaler.load_state_dict(replica["scaler"])

    if leaders and len(leaders) != len(sync.groups.leaders) and job.ddp.is_main_process():
        log.warning(
            f"the checkpoint has {len(leaders)} replicas, and this run {len(sync.groups.leaders)}: they continue from "
            "those in turn"
        )
