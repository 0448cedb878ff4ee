"""The step of `--train.exact elastic`: the same bits on any number of ranks.

The global batch is split into a fixed number of shards, and everything that could depend on the
number of ranks depends on the shard instead: micro-batches, random numbers inside the model, the
gradient, the weight of the loss. Buffers start from the same values in every shard; those of shard
0 are kept.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import UsageError
from drumline.data.loader import MicroBatch, Step
from drumline.data.sharding import StepPlan, shards_of_rank
from drumline.parallel.shard_sum import ShardSum
from drumline.rank.collectives import broadcast_json
from drumline.rank.determinism import seed_shard
from drumline.training.job.job import Job
from drumline.training.steps.eager import LossParts, TrainStep, correction_for
from drumline.watch.heartbeat import BACKWARD, DATA


class ElasticStep(TrainStep):
    """Runs a job's steps shard by shard."""

    def __init__(
        self, job: Job, *, seed: int, clip_norm: float | None, bucket_bytes: int, find_unused: bool
    ) -> None:
        # Ranks may have different numbers of shards, so a collective in the forward pass would
        # block forever.
        for name, module in job.model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UsageError(
                    f"the model's {name} is a SyncBatchNorm, but in elastic mode batch statistics belong to the shard",
                    next_step="use nn.BatchNorm in its place, or train without --train.exact elastic",
                )
        super().__init__(job, clip_norm=clip_norm)
        world_size = job.ddp.world_size
        self._seed = seed
        self._is_first_step = True
        self._buffers_before: list[Tensor] = []
        self._buffers_after_first: list[Tensor] = []
        self._gradients = ShardSum(
            {name: tensor for name, tensor in job.model.named_parameters() if tensor.requires_grad},
            rank=job.ddp.rank,
            world_size=world_size,
            shards_by_rank=lambda num_shards: [
                shards_of_rank(number, num_shards=num_shards, world_size=world_size)
                for number in range(world_size)
            ],
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
        self, weights: Tensor | None, loss: LossParts, micro: MicroBatch, plan: StepPlan
    ) -> Tensor | None:
        shard_weight = self._add_weight(None, loss.weight, micro)
        if shard_weight is None:
            return None
        if weights is None:
            weights = torch.zeros(
                plan.num_shards, dtype=shard_weight.dtype, device=shard_weight.device
            )
        weights[micro.shard] += shard_weight
        return weights

    def _weight_correction(self, weights: Tensor | None, plan: StepPlan) -> Tensor | None:
        """Collective if the loss has weights. Each rank fills in its own shards of the table, so
        the sum over ranks only adds zeros, and every rank adds up the shards in the same order."""
        if not self._is_weighted:
            return None
        if weights is None:
            weights = torch.zeros(plan.num_shards, dtype=torch.float64, device=self._device)
        if self._world_size > 1:
            dist.all_reduce(weights)
        return correction_for(weights.sum(), plan.global_size)

    def _agree_on_the_loss(self) -> None:
        """Collective, once: a rank without a shard does not know whether the loss has weights, and
        its metrics."""
        if self._is_first_step:
            first_loss = {"weighted": self._is_weighted, "metrics": list(self._meter.names)}
            first_loss = broadcast_json(first_loss, device=self._device)
            self._is_weighted = first_loss["weighted"]
            self._meter.prepare(first_loss["metrics"])
            self._is_first_step = False
