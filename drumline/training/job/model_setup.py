"""The model of a run: built on the host or without memory (`--dist.meta_init`), and wrapped for its
`--dist.mode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from drumline.base.errors import UsageError
from drumline.config.schema import Config, DistConfig, sync_interval
from drumline.parallel.meta_init import ModuleInit, check_can_initialize
from drumline.parallel.outer_sync import ReplicaGroups, make_replica_groups
from drumline.parallel.recompute import recompute_blocks
from drumline.parallel.sharded_model import ShardingPlan
from drumline.training.job.evaluation_job import is_channels_last
from drumline.training.manager import RunManager
from drumline.training.steps.compiled_blocks import compile_blocks
from drumline.training.tasks.base import Task


def plan_sharding(config: Config, ddp: RunManager) -> ShardingPlan | None:
    """How the model is sharded; None: it is not, as on one process."""
    dist = config.dist
    world_size = ddp.world_size
    if dist.mode == "ddp" or world_size == 1:
        return None
    assert dist.mode != "auto", "settle_mode comes first"
    num_shards = world_size
    if dist.mode == "hsdp":
        num_shards = dist.shard_ranks or ddp.local_world_size
    if dist.offload_optimizer and ddp.device.type != "cuda":
        raise UsageError("--dist.offload_optimizer needs GPUs", next_step="leave it off on the CPU")
    if num_shards < 2 or world_size % num_shards:
        raise UsageError(
            f"hsdp cannot split {world_size} ranks into groups of {num_shards} that hold one model each",
            next_step=f"set --dist.shard_ranks to a divisor of {world_size} from 2 on, or use --dist.mode fsdp",
        )
    return ShardingPlan(
        mode=dist.mode,
        num_shards=num_shards,
        wrap=dist.wrap or (),
        dtype=torch.bfloat16 if dist.shard_dtype == "bf16" else None,
        offloads=dist.offload_optimizer,
        finds_unused=dist.find_unused_parameters,
        timeout_s=ddp.train_timeout_s,
    )


def set_up_model(
    config: Config,
    task: Task,
    ddp: RunManager,
    plan: ShardingPlan | None,
    on_model: Callable[[nn.Module], None] | None = None,
) -> tuple[nn.Module, ReplicaGroups | None]:
    """Collective: the task's model, wrapped, and the replicas of `--dist.sync`. `on_model` is
    called with the new model, before it is compared."""
    prepare = None
    if config.dist.meta_init:
        with torch.device("meta"):
            model = task.model()
        check_can_initialize(model)
        prepare = ModuleInit(config.train.seed)
    else:
        model = task.model()
    if on_model is not None:
        on_model(model)
    recompute_blocks(model, config.model.activation_checkpointing, config.dist.wrap or ())
    if plan is not None and config.train.step == "compile":
        compile_blocks(model, config.dist.wrap or ())
    if plan is None:
        if prepare is not None:
            prepare(model.named_modules())
        groups = _make_groups(config.dist, model, ddp)
        return _wrap(config, model, ddp, groups), groups
    if config.dist.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return ddp.shard(model, plan, prepare=prepare), None


def _make_groups(dist: DistConfig, model: nn.Module, ddp: RunManager) -> ReplicaGroups | None:
    """Collective: the replicas of `--dist.sync`; None: all ranks reduce their gradients in every
    step."""
    if not sync_interval(dist.sync) or (rendezvous := ddp.connection.rendezvous) is None:
        return None
    replicas: Sequence[tuple[int, ...]] = rendezvous.nodes
    if dist.sync_within == "none":
        replicas = [(rank,) for rank in range(ddp.world_size)]
    may_grow = dist.on_lost_node == "continue"
    groups = make_replica_groups(replicas, timeout_s=ddp.train_timeout_s, may_grow=may_grow)
    for name, module in model.named_modules():
        if groups is not None and isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"the model's {name} is a SyncBatchNorm, which needs all ranks in every step, but with --dist.sync "
                f"{dist.sync} replicas train alone",
                next_step="use nn.BatchNorm in its place; --dist.sync_batchnorm with --dist.sync_within node "
                "synchronizes it inside nodes",
            )
    return groups


def _wrap(
    config: Config, model: nn.Module, ddp: RunManager, groups: ReplicaGroups | None
) -> nn.Module:
    dist = config.dist
    is_alone = groups is not None and groups.within is None
    return ddp.wrap_applied(
        model,
        channels_last=is_channels_last(config.train, model, ddp.device),
        reduces_gradients=config.train.exact != "elastic" and not is_alone,
        group=None if groups is None else groups.within,
        sync_batchnorm=dist.sync_batchnorm,
        find_unused_parameters=dist.find_unused_parameters,
        broadcast_buffers=False,  # the step does it, at its end
        bucket_cap_mb=dist.bucket_cap_mb,
        gradient_as_bucket_view=dist.gradient_as_bucket_view,
        static_graph=dist.static_graph,
        comm="none" if dist.comm == "powersgd" else dist.comm,
    )
