"""One optimizer step: the hot path. Nothing here waits for the device, and nothing is done per
sample.

A task's loss is a sum over its micro-batch, but the gradient must be that of the mean over the
whole global batch. DDP averages over ranks, so each sum is scaled by world_size / (samples in the
global batch) before its backward pass. A loss with weights (tokens) needs their sum over all ranks:
it is reduced while the last backward pass runs, and the gradients are then corrected by one
multiplication. A replica of `--dist.sync` takes the mean over its own samples: on several ranks
their number is such a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drumline.base.errors import TrainingError, UnusedParametersError, UsageError
from drumline.base.text import join_names
from drumline.data.loader import MicroBatch, Step
from drumline.data.sharding import StepPlan, shards_of_rank
from drumline.parallel.shard_sum import ShardSum
from drumline.parallel.sharded_model import ShardedModel
from drumline.parallel.shards import own_parts
from drumline.parallel.wrap import FIND_UNUSED, NAMED, LiveBuffers, names_without_gradient
from drumline.rank.collectives import broadcast_json
from drumline.rank.determinism import seed_shard
from drumline.rank.torch_internals import scale_each
from drumline.training.job.job import Job, refuse_sync_batchnorm
from drumline.training.tasks.base import Loss, Task
from drumline.watch.heartbeat import BACKWARD, DATA, FORWARD, OPTIMIZER

NOT_STATIC = "set --dist.find_unused_parameters in place of --dist.static_graph"
OUTSIDE_FORWARD = "mixed torch.Tensor and DTensor"
"""In torch's error when a shard is used as if it were the whole parameter."""


AnyStep = Callable[[Step], None]
"""Any kind of step. Collective: one optimizer step."""


class LossParts(NamedTuple):
    """A `Loss` as a plain tuple of tensors, for DDP and torch.compile."""

    total: Tensor
    """The sum over the micro-batch."""

    weight: Tensor | float | None
    """What the sum is divided by over the global batch; None: the number of samples."""

    metrics: dict[str, Tensor]


LossFunction = Callable[[nn.Module, Any], LossParts]


def loss_function(task: Task) -> LossFunction:
    """The task's loss of a model and a batch, checked."""

    def parts(model: nn.Module, batch: Any) -> LossParts:
        """The loss of one batch; raises if the task has returned something else."""
        loss = task.loss(model, task.on_device(batch))
        if not isinstance(loss, Loss):
            raise UsageError(
                f"{type(task).__name__}.loss() returned a {type(loss).__name__}, not a Loss",
                next_step="return drumline.Loss(the sum of the loss over the batch)",
            )

        # Detached: to DDP every parameter in the graph of an output is used.
        weight = loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight
        metrics = {name: total.detach() for name, total in loss.metrics.items()}
        return LossParts(loss.total, weight, metrics)

    return parts


class TrainStep:
    """Runs a job's steps; holds what would otherwise be created in every step."""

    def __init__(
        self,
        job: Job,
        *,
        clip_norm: float | None = None,
        sends_buffers: bool = True,
        compute_loss: LossFunction | None = None,
    ) -> None:
        """`compute_loss`: replaces the task's own, for example with a compiled one."""
        self.compute_loss = compute_loss or loss_function(job.task)
        self._applied = job.applied
        self._optimizer = job.optimizer
        self._meter = job.meter
        self._finite = job.finite
        self._autocast = job.autocast
        self._scaler = job.scaler

        self._clip_norm = clip_norm
        self._device = job.ddp.device
        self._parameters = [p for p in job.model.parameters() if p.requires_grad]

        # The ranks whose gradients are reduced together.
        self._group: dist.ProcessGroup | None = None
        self._leader = 0
        self._num_ranks = job.ddp.world_size
        self._is_alone = False

        if job.sync is not None:
            replica = job.sync.groups
            self._group = replica.within
            self._leader = replica.members[0]
            self._num_ranks = len(replica.members)
            self._is_alone = self._num_ranks == 1

        # What depends on the wrapper of the model.
        applied = job.applied
        self._no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
        self._check_reducer: Callable[[], None] | None = None
        self._own: Callable[..., list[Tensor]] = list
        self._clip: Callable[..., Tensor] = nn.utils.clip_grad_norm_

        if isinstance(applied, DistributedDataParallel):
            self._no_sync = applied.no_sync
            self._check_reducer = applied._check_reducer_finalized
        elif isinstance(applied, ShardedModel):
            self._no_sync = applied.no_sync
            self._check_reducer = applied.use.end_step
            self._own = own_parts
            self._clip = applied.clip_grad_norm_

        self._buffers = LiveBuffers(job.model)
        self._sends_buffers = sends_buffers and not self._is_alone
        self._heartbeat = job.heartbeat
        self._is_weighted: bool | None = None

    def __call__(self, step: Step) -> None:
        """Collective: forward and backward of every micro-batch, one synchronization, one update.
        The heartbeat is marked between them; the loop has marked the beginning of the step."""
        num_samples = max(1, step.plan.local_size) if self._is_alone else step.plan.global_size
        scale = self._num_ranks / num_samples
        weight: Tensor | None = None
        reduction: dist.Work | None = None
        self._finite.begin()

        for micro in step.micro_batches:
            with nullcontext() if micro.is_last else self._no_sync():
                loss = self._forward(micro)
                weight = self._add_weight(weight, loss.weight, micro)
                if micro.is_last and self._num_ranks > 1:
                    weight, reduction = self._reduce(weight, step.plan.local_size)
                self._backward(loss, scale if micro.size else 0.0)

            self._measure(loss, micro)
            if not micro.is_last:
                self._heartbeat.mark(DATA)

        self._check_all_reduced()
        if reduction is not None:
            reduction.wait()
        if self._sends_buffers:
            self._buffers.broadcast(self._group, self._leader)

        self._update(None if weight is None else correction_for(weight, num_samples))

    def _reduce(
        self, weight: Tensor | None, num_samples: int
    ) -> tuple[Tensor | None, dist.Work | None]:
        """Collective: begin to sum the weights over all ranks, or over those of the replica; it
        ends while the backward pass runs. None: the loss has no weights, and the number of samples
        is known."""
        if weight is None and self._group is not None:
            weight = torch.full((), num_samples, dtype=torch.float64, device=self._device)
        if weight is None:
            return None, None
        return weight, dist.all_reduce(weight, group=self._group, async_op=True)

    def _forward(self, micro: MicroBatch) -> LossParts:
        """The loss of a micro-batch, by the wrapped model."""
        self._heartbeat.next_micro()
        self._heartbeat.mark(FORWARD)
        try:
            with self._autocast:
                loss: LossParts = self._applied(self.compute_loss, micro.data)
        except RuntimeError as error:
            if OUTSIDE_FORWARD in str(error):
                raise UsageError(
                    "the loss uses parameters of the sharded model outside its forward pass",
                    next_step="let loss() call model(...), or a module that --dist.wrap names, and nothing inside "
                    "them; or use --dist.mode ddp",
                ) from error

            raise

        return loss

    def _check_all_reduced(self) -> None:
        """Raise if the last backward pass left out parameters. The peers that use them wait for
        their gradients, so this rank must not call another collective; DDP itself raises only in
        the next forward pass."""
        if self._check_reducer is None:
            return

        try:
            self._check_reducer()
        except RuntimeError as error:
            names = names_without_gradient(error)
            if names is None:
                raise

            is_static = getattr(self._applied, "static_graph", False)
            raise UnusedParametersError(
                f"the loss does not use these parameters: {join_names(names, most=NAMED) or 'unknown'}",
                next_step=NOT_STATIC if is_static else FIND_UNUSED,
            ) from None

    def _backward(self, loss: LossParts, scale: float) -> None:
        """Add a micro-batch to the gradients; with DDP, those of the last one are reduced meanwhile."""
        self._heartbeat.mark(BACKWARD)

        total = self._finite.spread(loss.total * scale, loss.total)
        if self._scaler is not None:
            total = self._scaler.scale(total)

        total.backward()  # type: ignore[no-untyped-call]

    def _measure(self, loss: LossParts, micro: MicroBatch) -> None:
        """Add a micro-batch to the logged sums; a placeholder only names them."""
        if micro.size == 0:
            self._meter.prepare(loss.metrics)
            return
        weight = micro.size if loss.weight is None else loss.weight
        self._finite.measure(loss.total, weight, loss.metrics)

    def _add_weight(
        self,
        so_far: Tensor | None,
        weight: Tensor | float | None,
        micro: MicroBatch,
    ) -> Tensor | None:
        """The sum of the weights so far, on the device; None: the loss has none."""
        if self._is_weighted is None:
            self._is_weighted = weight is not None

        if self._is_weighted != (weight is not None):
            raise TrainingError(
                "the task's Loss has a weight in some batches and none in others",
                next_step="give every Loss a weight, or none",
            )

        if weight is None:
            return None

        if so_far is None:
            so_far = torch.zeros((), dtype=torch.float64, device=self._device)

        return so_far.add_(weight) if micro.size else so_far

    def _update(self, correction: Tensor | None) -> None:
        """Collective: the optimizer's step, with gradients corrected and clipped. The loss scaler's
        factor is taken out first, where that changes numbers."""
        self._heartbeat.mark(OPTIMIZER)
        if self._scaler is not None and (self._clip_norm is not None or correction is not None):
            self._scaler.unscale_(self._optimizer)

        if correction is not None:
            gradients = self._own(p.grad for p in self._parameters if p.grad is not None)
            if gradients:
                scale_each(gradients, correction.to(gradients[0].device))

        if self._clip_norm is not None:
            self._finite.grad_norm = self._clip(self._parameters, self._clip_norm)

        self._finite.check(self._parameters)
        self._finite.take_optimizer_step()
        self._optimizer.zero_grad(set_to_none=True)


def correction_for(weight: Tensor, num_samples: int) -> Tensor:
    """The factor from a mean over samples to one over weights; a batch with a total weight of 0 is
    not changed. With 64 samples of 1000 tokens in all it is 64 / 1000."""
    return num_samples / torch.where(weight > 0, weight, 1.0)


class ElasticStep(TrainStep):
    """The step of `--train.exact elastic`: the same bits on any number of ranks.

    The global batch is split into a fixed number of shards, and everything that could depend on the
    number of ranks depends on the shard instead: micro-batches, random numbers inside the model,
    the gradient, the weight of the loss. Buffers start from the same values in every shard; those
    of shard 0 are kept."""

    def __init__(
        self,
        job: Job,
        *,
        seed: int,
        clip_norm: float | None,
        bucket_bytes: int,
        find_unused: bool,
    ) -> None:
        # Ranks may have different numbers of shards, so a collective in the forward pass would
        # block forever.
        refuse_sync_batchnorm(
            job.model,
            "in elastic mode batch statistics belong to the shard",
            instead="or train without --train.exact elastic",
        )

        super().__init__(job, clip_norm=clip_norm)
        world_size = job.ddp.world_size
        self._seed = seed

        self._is_first_step = True
        self._buffers_before: list[Tensor] = []
        self._buffers_after_first: list[Tensor] = []

        def shards_by_rank(num_shards: int) -> list[range]:
            """Those of each rank, of so many."""
            return [
                shards_of_rank(rank, num_shards=num_shards, world_size=world_size)
                for rank in range(world_size)
            ]

        self._gradients = ShardSum(
            {name: tensor for name, tensor in job.model.named_parameters() if tensor.requires_grad},
            rank=job.ddp.rank,
            world_size=world_size,
            shards_by_rank=shards_by_rank,
            bucket_bytes=bucket_bytes,
            find_unused=find_unused,
        )

    def __call__(self, step: Step) -> None:
        """Collective: forward and backward of every shard, one synchronisation, one update."""
        plan = step.plan
        weights: Tensor | None = None
        shard = None
        num_opened = 0
        self._finite.begin()

        shares_buffers = plan.has_several_shards and bool(self._buffers)
        if shares_buffers:
            self._buffers_before = self._buffers.keep(self._buffers_before)

        for micro in step.micro_batches:
            if micro.shard != shard:
                shard = micro.shard
                seed_shard(self._seed, epoch=plan.epoch, start=plan.start, shard=shard)

                if shares_buffers and num_opened == 1:
                    self._buffers_after_first = self._buffers.keep(self._buffers_after_first)
                if shares_buffers and num_opened > 0:
                    self._buffers.put_back(self._buffers_before)

                num_opened += 1
                self._gradients.open_shard()

            loss = self._forward(micro)
            weights = self._add_shard_weight(weights, loss, micro, plan)
            if micro.is_last:
                self._gradients.send_along(shard, plan.num_shards)

            self._backward(loss, 1 / plan.global_size)
            if micro.ends_shard:
                self._gradients.close_shard(shard, plan.num_shards)

            self._measure(loss, micro)
            if not micro.is_last:
                self._heartbeat.mark(DATA)

        self._heartbeat.mark(BACKWARD)  # a rank may have no shard of a short batch

        # From here on every rank calls the same collectives in the same order. Gradients come
        # first, since most ranks have already begun to send them.
        self._gradients.finish(plan.num_shards)

        self._agree_on_the_loss()
        if shares_buffers and num_opened > 1:
            self._buffers.put_back(self._buffers_after_first)

        self._buffers.broadcast()
        self._update(self._weight_correction(weights, plan))

    def _add_shard_weight(
        self,
        weights: Tensor | None,
        loss: LossParts,
        micro: MicroBatch,
        plan: StepPlan,
    ) -> Tensor | None:
        """The weights by shard, with this micro-batch's; None: the loss has none. Other ranks fill
        in the rest."""
        shard_weight = self._add_weight(None, loss.weight, micro)
        if shard_weight is None:
            return None

        if weights is None:
            weights = shard_weight.new_zeros(plan.num_shards)

        weights[micro.shard] += shard_weight
        return weights

    def _weight_correction(self, weights: Tensor | None, plan: StepPlan) -> Tensor | None:
        """Collective if the loss has weights. Each rank fills in its own shards of the table, so
        the sum over ranks only adds zeros, and every rank adds up the shards in the same order."""
        if not self._is_weighted:
            return None

        if weights is None:
            weights = torch.zeros(plan.num_shards, dtype=torch.float64, device=self._device)
        if self._num_ranks > 1:
            dist.all_reduce(weights)
        return correction_for(weights.sum(), plan.global_size)

    def _agree_on_the_loss(self) -> None:
        """Collective, once: a rank without a shard does not know whether the loss has weights, and
        its metrics."""
        if self._is_first_step:
            names = list(self._meter.names)
            self._is_weighted, names = broadcast_json([self._is_weighted, names])

            self._meter.prepare(names)
            self._is_first_step = False
