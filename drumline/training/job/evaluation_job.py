"""What an evaluation works on: the model, the evaluation sets and the metrics. The job of a training
run (`job`) has these and more; a checkpoint is evaluated without training data and without an
optimizer. Below, how either gets its data and its model: built on the host or without memory
(`--dist.meta_init`), and wrapped for its `--dist.mode`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, assert_never
from weakref import WeakKeyDictionary

import torch
from torch import nn

from drumline.base.errors import UsageError
from drumline.base.terminal import print_message
from drumline.config.schema import Config, DistConfig, TrainConfig, sync_interval
from drumline.data.bucket_copy import BucketCopy
from drumline.data.dataset import fingerprint
from drumline.data.evaluation_loader import EvaluationLoader
from drumline.metrics.meters import check_names
from drumline.parallel.meta_init import ModuleInit, check_can_initialize
from drumline.parallel.recompute import recompute_blocks
from drumline.parallel.replica_groups import ReplicaGroups, make_replica_groups
from drumline.parallel.sharded_model import ShardingPlan
from drumline.parallel.shards import is_shard
from drumline.parallel.wrap import gains_from_channels_last, unwrap_model
from drumline.rank.collectives import check_same
from drumline.rank.failure import wait_for_ranks
from drumline.storage.object_store import is_store_url
from drumline.training.job.task_metrics import make_metrics
from drumline.training.manager import RunManager
from drumline.training.steps.compiled_blocks import compile_blocks
from drumline.training.tasks.base import Metric, Task
from drumline.watch.heartbeat import HeartbeatWriter, Phase

CACHE = Path(".cache", "drumline", "data")
# Of each group: a rank that joins a later one has not called it as often.
_CALLS: WeakKeyDictionary[RunManager, Iterator[int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class EvaluationJob:
    """What evaluations, and hooks around them, work on."""

    task: Task
    ddp: RunManager
    model: nn.Module
    """The task's own model, on the device."""
    autocast: AbstractContextManager[object]
    eval_loaders: Mapping[str, EvaluationLoader]
    """The evaluation sets by name; a single one is called ''."""
    metrics: Mapping[str, Metric]
    """The task's own, for evaluations."""

    @property
    def heartbeat(self) -> HeartbeatWriter:
        return self.ddp.connection.heartbeat

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are sharded: a forward pass is then collective."""
        return is_shard(next(self.model.parameters(), None))

    @property
    def eval_samples(self) -> int | None:
        """Of all evaluation sets; None if the length of a stream is not known yet."""
        sizes = [loader.num_samples for loader in self.eval_loaders.values()]
        return None if None in sizes else sum(filter(None, sizes))

    def reported(self, means: dict[str, float]) -> dict[str, float]:
        """The numbers for the log: the task's `report` of the means."""
        numbers = self.task.report(means)
        check_names(numbers)
        return numbers

    def close(self) -> None:
        """End the processes that load data."""
        for loader in self.eval_loaders.values():
            loader.close()


def build_evaluation_job(
    config: Config,
    task: Task,
    ddp: RunManager,
    sets: Mapping[str, Any],
    *,
    has_metrics: bool = True,
) -> EvaluationJob:
    """Collective: build the model, as a training run has it, and the loaders of these sets, and
    compare them across ranks. `has_metrics`: whether the task's own are measured."""
    ddp.connection.heartbeat.mark(Phase.START)
    set_arithmetic(config.train, ddp.device)
    check_same_data(ddp, evaluation_facts(sets))
    loaders = make_eval_loaders(config, task, ddp, sets)
    model = task.model()
    channels_last = is_channels_last(config.train, model, ddp.device)
    wrapped = ddp.wrap_applied(model, channels_last=channels_last, reduces_gradients=False)
    return EvaluationJob(
        task=task,
        ddp=ddp,
        model=unwrap_model(wrapped),
        autocast=make_autocast(config.train.precision, ddp.device),
        eval_loaders=loaders,
        metrics=make_metrics(task, ddp) if has_metrics else {},
    )


def evaluation_sets(task: Task) -> dict[str, Any]:
    """The datasets by name; '' for a single one."""
    data = task.eval_data()
    if isinstance(data, Mapping) and all(isinstance(name, str) for name in data):
        return dict(data)
    return {} if data is None else {"": data}


def evaluation_facts(sets: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on every rank."""
    facts: dict[str, Any] = {"the evaluation sets": list(sets)}
    return facts | {
        f"the evaluation data {name}".rstrip(): fingerprint(data) for name, data in sets.items()
    }


def check_same_data(ddp: RunManager, facts: Mapping[str, Any]) -> None:
    """Collective. The rendezvous has compared versions, settings and code."""
    check_same(
        facts,
        host=ddp.host,
        next_step="start every rank with the same command, packages and data (data.dir and data.cache may differ)",
    )


def loading_options(config: Config, task: Task) -> dict[str, Any]:
    """How `DDPManager.loader` reads the task's data."""
    data = config.data
    return {
        "workers": data.workers,
        "pin_memory": data.pin_memory,
        "persistent_workers": data.persistent_workers,
        "prefetch_factor": data.prefetch_factor,
        "collate": task.collate,
    }


def make_eval_loaders(
    config: Config, task: Task, ddp: RunManager, sets: Mapping[str, Any]
) -> dict[str, EvaluationLoader]:
    """Of sets that `check_same_data` has compared."""
    options: dict[str, Any] = {
        **loading_options(config, task),
        "batch_size": config.train.eval_batch_size,
        "compare": False,
    }
    return {name: ddp.loader(data, train=False, **options) for name, data in sets.items()}


def with_local_data(config: Config, ddp: RunManager) -> Config:
    """Collective: the settings, with `data.dir` as the path of a copy where it is a URL: one rank of
    each machine copies the data to its disk before the job is built."""
    url = config.data.dir
    if url is None or not is_store_url(url):
        return config
    heartbeat = ddp.connection.heartbeat
    copy = BucketCopy(
        url=url,
        cache=Path(config.data.cache or Path.home() / CACHE).absolute(),
        report=print_message if ddp.is_main_process() else lambda text: None,
        alive=lambda: heartbeat.mark(Phase.START),
    )
    if ddp.get_local_rank() == 0:
        copy.update()
    if ddp.connection.store is not None:
        # with --dist.mode auto there are two
        what = f"data-copied/{next(_CALLS.setdefault(ddp, count()))}"
        # A download has no limit here: the watchdog observes it, and one that fails ends the job.
        wait_for_ranks(ddp.connection.store, what, ddp.rank, ddp.world_size, limit_s=math.inf)
    return replace(config, data=replace(config.data, dir=str(copy.folder)))


def set_arithmetic(train: TrainConfig, device: torch.device) -> None:
    """Set TF32 and cuDNN's search for kernels, for the whole process."""
    if device.type != "cuda":
        return
    match train.tf32:
        case "auto":
            pass
        case "on" | "off":
            is_allowed = train.tf32 == "on"
            torch.backends.cuda.matmul.allow_tf32 = is_allowed
            torch.backends.cudnn.allow_tf32 = is_allowed
        case _:
            assert_never(train.tf32)
    torch.backends.cudnn.benchmark = train.cudnn_benchmark


def make_autocast(
    precision: Literal["fp32", "bf16", "fp16"], device: torch.device
) -> AbstractContextManager[object]:
    """A context for forward passes, made once and entered in every step. fp32 needs none."""
    match precision:
        case "fp32":
            return nullcontext()
        case "bf16":
            return torch.autocast(device.type, dtype=torch.bfloat16)
        case "fp16":
            return torch.autocast(device.type, dtype=torch.float16)
        case _:
            assert_never(precision)


def is_channels_last(train: TrainConfig, model: nn.Module, device: torch.device) -> bool:
    """Tensor cores are faster with channels last; on the CPU it gains little."""
    match train.memory_format:
        case "auto":
            return device.type == "cuda" and gains_from_channels_last(model)
        case "contiguous":
            return False
        case "channels_last":
            return True
        case _:
            assert_never(train.memory_format)


def plan_sharding(config: Config, ddp: RunManager) -> ShardingPlan | None:
    """How the model is sharded; None: it is not, as on one process."""
    dist = config.dist
    world_size = ddp.world_size
    if dist.mode == "ddp" or world_size == 1:
        return None
    match dist.mode:
        case "zero1" | "fsdp":
            num_shards = world_size
        case "hsdp":
            num_shards = dist.shard_ranks or ddp.local_world_size
        case "auto":
            raise AssertionError("settle_mode comes first")
        case _:
            assert_never(dist.mode)
    match dist.shard_dtype:
        case "fp32":
            dtype = None
        case "bf16":
            dtype = torch.bfloat16
        case _:
            assert_never(dist.shard_dtype)
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
        dtype=dtype,
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
    replicas: Sequence[tuple[int, ...]]
    match dist.sync_within:
        case "node":
            replicas = rendezvous.nodes
        case "none":
            replicas = [(rank,) for rank in range(ddp.world_size)]
        case _:
            assert_never(dist.sync_within)
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
