"""The parts of a run on one rank, built in the order that distributed training needs, and compared
across ranks.

All ranks build the model from the same seed; it is moved to its device and compared before it is
wrapped; the optimizer is built from the parameters on the device.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import get_world_size
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drumline.base.errors import UsageError, log
from drumline.config.fields import scope_of
from drumline.config.rules import sync_interval
from drumline.config.schema import Config, DistConfig, TrainConfig
from drumline.data.dataset import fingerprint
from drumline.data.loader import EvaluationLoader
from drumline.data.sharding import Cursor
from drumline.data.stream_loader import AnyLoader, StreamLoader
from drumline.metrics.meters import Meter
from drumline.parallel.comm_hook import PowerSGD
from drumline.parallel.meta_init import ModuleInit, check_can_initialize
from drumline.parallel.outer_sync import OuterSync, make_sync
from drumline.parallel.recompute import recompute_blocks
from drumline.parallel.replica_groups import ReplicaGroups, make_replica_groups
from drumline.parallel.sharded_model import ShardedModel, ShardingPlan
from drumline.parallel.wrap import LiveBuffers, has_batchnorm, unwrap_model
from drumline.rank.collectives import check_same, gather_json
from drumline.rank.determinism import platform_facts
from drumline.rank.group import NO_REGISTRATION
from drumline.training.job.evaluation_job import (
    EvaluationJob,
    check_same_data,
    evaluation_facts,
    evaluation_sets,
    is_channels_last,
    loading_options,
    make_autocast,
    make_eval_loaders,
    make_metrics,
    set_arithmetic,
)
from drumline.training.job.optimizer import (
    FiniteSteps,
    LearningRates,
    group_settings,
    optimizer_of,
    peak_rate,
)
from drumline.training.manager import RunManager
from drumline.training.steps.compiled_blocks import compile_blocks
from drumline.training.tasks.base import Task
from drumline.watch.heartbeat import Phase

CAPTURING = ("graph", "compiled_graph", "auto")
"""The kinds of steps that capture a graph, or may do so."""


@dataclass
class Progress:
    """How far a run is. Only the loop and its actions change it."""

    step: int = 0
    """Steps that are done."""

    cursor: Cursor = field(default_factory=Cursor)
    """Where in the data the next step begins."""

    saved_step: int | None = None
    """The step of the newest checkpoint that this start has begun to write, or None."""

    is_stopping: bool = False
    """The run was preempted, and ends before its last step."""

    last_step: int = sys.maxsize
    """The run ends after it."""

    stopped: dict[str, Any] | None = None
    """A hook has ended the run: its `reason`, and the `run_length` that the run would have had."""

    metrics: dict[str, Any] = field(default_factory=dict)
    """The metrics of the latest evaluation: numbers and nested lists of numbers."""

    evaluated_step: int | None = None
    """The step of the latest evaluation of this start."""

    @property
    def epoch(self) -> int:
        """The epoch of the latest step, counted from 1."""
        return max(1, self.cursor.epoch + (self.cursor.position > 0))


@dataclass(frozen=True)
class GlobalBatch:
    """The batch of one optimizer step."""

    size: int
    """Samples over all ranks."""

    accumulate: int
    """Micro-batches of a rank in a step."""

    micro_batch_size: int | None
    """The most samples that a rank computes at once; None: as `accumulate` splits them."""

    initial_world_size: int
    """The number of ranks when the run began; the rate may be scaled by it."""

    note: str | None = None
    """A note for the log."""


@dataclass(frozen=True)
class Job(EvaluationJob):
    """What the step, the loop, evaluation and checkpoints work on."""

    applied: nn.Module
    """The wrapped model, called with a function of the model and its arguments; under DDP if there
    is a group."""

    optimizer: Optimizer
    rates: LearningRates
    scaler: GradScaler | None
    loader: AnyLoader
    meter: Meter
    finite: FiniteSteps
    batch: GlobalBatch
    data_fingerprint: str
    step_kind: str
    """A value of `train.step`."""

    group_settings: list[dict[str, Any]]
    """The optimizer's before its first step, by parameter group."""

    comm: PowerSGD | None
    """What reduces the gradients, if it has a state (`--dist.comm powersgd` on several ranks)."""

    sync: OuterSync | None
    """What synchronizes the replicas, if they do not reduce their gradients in every step
    (`--dist.sync`)."""

    captured_steps: WeakSet[Any] = field(default_factory=WeakSet)
    """The steps of `steps/graph.py` that are still in use."""

    def shared_weights(self) -> AbstractContextManager[None]:
        """In it the model has the weights and buffers that all ranks share: with `--dist.sync`
        those of the last round, otherwise those that it has."""
        return nullcontext() if self.sync is None else self.sync.shared_weights()

    @property
    def sharded(self) -> ShardedModel | None:
        return self.applied if isinstance(self.applied, ShardedModel) else None

    def close(self) -> None:
        """Release captured steps, which must not outlive the process group, and end the processes
        that load data."""
        for captured in self.captured_steps:
            captured.release()
        self.loader.close()
        super().close()


def make_manager(config: Config, task: str = "", *, run: Path | None = None) -> RunManager:
    """This rank's manager, from the settings. `task`: the user's name for it. `run`: its
    folder."""
    is_elastic = config.train.exact == "elastic"
    may_have_gpu = config.dist.device != "cpu" and torch.cuda.is_available()
    if config.train.step in CAPTURING or (config.train.step is None and may_have_gpu):
        # Ranks capture CUDA graphs independently, not all in the same step.
        os.environ.setdefault(*NO_REGISTRATION)

    return RunManager(
        device=config.dist.device,
        backend=config.dist.backend,
        start_timeout_s=config.dist.start_timeout_s,
        train_timeout_s=config.dist.train_timeout_s,
        seed=config.train.seed,
        deterministic=config.train.deterministic or is_elastic,
        threads=config.dist.threads or (1 if is_elastic else None),
        settings=compared_settings(config, task),
        same_code=config.dist.same_code,
        watch=config.watch,
        run=run,
        prometheus=config.log.prometheus if run is not None else None,
    )


def compared_settings(config: Config, task: str) -> dict[str, Any]:
    """The settings that must be the same on every rank, and the name of the task."""
    settings = {
        name: value
        for name, value in flat(config).items()
        if not scope_of(name).may_differ_across_ranks
    }

    # The task's file may be in a different folder on each node.
    return {**settings, "TASK": task.rpartition("/")[2]}


def flat(config: Config) -> dict[str, Any]:
    """The settings by their dotted names, in JSON's types: `{"optim.lr": 0.1, "train.epochs": 10,
    ...}`."""
    sections = json.loads(json.dumps(asdict(config)))
    return {
        f"{section}.{name}": value
        for section, fields in sections.items()
        for name, value in fields.items()
    }


def choose_batch(
    train: TrainConfig,
    *,
    world_size: int,
    saved: Mapping[str, Any] | None = None,
) -> GlobalBatch:
    """The global batch, which does not depend on the number of ranks once the run has begun.
    `saved`: the facts of the checkpoint that the run resumes from."""
    per_rank = train.batch_size_per_rank or 1
    size = train.batch_size or per_rank * world_size
    began_with = None if saved is None else saved["config"].get("train.batch_size_per_rank")

    # With a changed batch per rank the user chooses a new global batch.
    is_chosen = train.batch_size is not None or began_with != per_rank
    if saved is None or is_chosen or saved["batch_size"] == size:
        return GlobalBatch(size, train.accumulate, train.micro_batch_size, world_size)

    size = int(saved["batch_size"])
    ranks = size // per_rank
    note = (
        f"the global batch stays {size}, as the run began ({per_rank} on each of {ranks} ranks): now "
        f"{size / world_size:.4g} on each of {world_size}"
    )

    # micro-batches belong to the shards, which do not change
    if train.exact == "elastic":
        return GlobalBatch(size, train.accumulate, train.micro_batch_size, ranks, note)

    # A rank holds no more samples at once than when the run began.
    most = train.micro_batch_size or -(-per_rank // train.accumulate)
    return GlobalBatch(size, 1, most, ranks, f"{note}, at most {most} at once")


def choose_step_kind(
    config: Config, device: torch.device, saved: Mapping[str, Any] | None = None
) -> str:
    """`train.step`; by default the kind that the run began with, and in a new run `auto` on a GPU,
    if its bits need not be the same each time, otherwise `eager`. `saved`: the facts of the
    checkpoint that the run resumes from."""
    if config.train.step is not None:
        return config.train.step
    if config.dist.mode != "ddp":
        return "eager"

    began_with = None if saved is None else saved["config"].get("train.step", "eager")
    if config.data.balance == "auto":
        # The shapes of a captured step are fixed, and trials would be measured too.
        return "compile" if began_with == "compile" else "eager"

    if device.type != "cuda":
        return began_with if began_with in ("compile", "auto") else "eager"
    if began_with is not None:
        return str(began_with)

    is_exact = config.train.deterministic or config.train.exact == "elastic" or config.log.trace
    return "eager" if is_exact else "auto"


def build_job(
    config: Config,
    task: Task,
    ddp: RunManager,
    *,
    saved: Mapping[str, Any] | None = None,
    step_kind: str | None = None,
    on_data: Callable[[], None] = lambda: None,
    on_model: Callable[[nn.Module], None] | None = None,
) -> Job:
    """Collective: build data, model and optimizer, and compare them across ranks. `saved`: the facts
    of the checkpoint that the run resumes from. `step_kind`: in place of that of the settings.
    `on_data` is called when the data is built; `on_model` gets the model before it is compared."""
    ddp.connection.heartbeat.mark(Phase.START)
    device = ddp.device
    step_kind = step_kind or choose_step_kind(config, device, saved)
    _prepare_device(config, device, step_kind)

    batch = choose_batch(config.train, world_size=ddp.world_size, saved=saved)
    plan = plan_sharding(config, ddp)
    loader, eval_loaders, data_fingerprint = _build_data(config, task, ddp, batch, plan)
    on_data()
    applied, groups = set_up_model(config, task, ddp, plan, on_model)
    model = unwrap_model(applied)
    _warn_about_data(config, ddp, loader, model, batch.size)

    lr = peak_rate(config.optim, world_size=batch.initial_world_size)
    optimizer = optimizer_of(task, model, config.optim, lr=lr, is_sharded=plan is not None)

    scaler = _make_scaler(config, device)
    meter = Meter(device)
    return Job(
        task=task,
        ddp=ddp,
        model=model,
        applied=applied,
        optimizer=optimizer,
        rates=LearningRates(optimizer, config.optim, task.schedule),
        scaler=scaler,
        autocast=make_autocast(config.train.precision, device),
        loader=loader,
        eval_loaders=eval_loaders,
        metrics=make_metrics(task, ddp) if eval_loaders else {},
        meter=meter,
        finite=FiniteSteps(
            config.train.on_nan,
            meter,
            LiveBuffers(model),
            optimizer,
            scaler,
            waits_for_device=device.type != "cpu",
            is_sharded=plan is not None,
        ),
        batch=batch,
        data_fingerprint=data_fingerprint,
        step_kind=step_kind,
        group_settings=group_settings(optimizer),
        comm=_power_sgd(config.dist, applied),
        sync=None if groups is None else make_sync(config.dist, model, groups),
    )


def _prepare_device(config: Config, device: torch.device, step_kind: str) -> None:
    """The precision of its arithmetic, and the stream that this kind of step needs."""
    set_arithmetic(config.train, device)
    leave_default_stream(device, step_kind)


def _make_scaler(config: Config, device: torch.device) -> GradScaler | None:
    """Gradients underflow without a scale in fp16; bf16 has the range of fp32 and needs none."""
    return GradScaler(device.type) if config.train.precision == "fp16" else None


def plan_sharding(config: Config, ddp: RunManager) -> ShardingPlan | None:
    """How the model is sharded; None: it is not, as on one process."""
    dist = config.dist
    world_size = ddp.world_size
    if dist.mode == "ddp" or world_size == 1:
        return None

    assert dist.mode != "auto", "settle_mode comes first"
    shards_of_node = dist.shard_ranks or ddp.local_world_size
    num_shards = {"zero1": world_size, "fsdp": world_size, "hsdp": shards_of_node}[dist.mode]

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
        dtype={"fp32": None, "bf16": torch.bfloat16}[dist.shard_dtype],
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

    blocks = config.dist.wrap or ()
    if config.model.activation_checkpointing:
        recompute_blocks(model, config.model.activation_checkpointing, blocks)

    if plan is None:
        if prepare is not None:
            prepare(model.named_modules())
        groups = _make_groups(config.dist, model, ddp)
        return _wrap(config, model, ddp, groups), groups

    if config.train.step == "compile":
        compile_blocks(model, blocks)
    if config.dist.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]

    return ddp.shard(model, plan, prepare=prepare), None


def _make_groups(dist: DistConfig, model: nn.Module, ddp: RunManager) -> ReplicaGroups | None:
    """Collective: the replicas of `--dist.sync`; None: all ranks reduce their gradients in every
    step."""
    rendezvous = ddp.connection.rendezvous
    if not sync_interval(dist.sync) or rendezvous is None:
        return None

    each_rank = [(rank,) for rank in range(ddp.world_size)]
    replicas: dict[str, Sequence[Sequence[int]]] = {"node": rendezvous.nodes, "none": each_rank}
    groups = make_replica_groups(
        replicas[dist.sync_within],
        timeout_s=ddp.train_timeout_s,
        may_grow=dist.on_lost_node == "continue",
    )

    if groups is not None:
        refuse_sync_batchnorm(
            model,
            f"with --dist.sync {dist.sync} replicas train alone",
            instead="--dist.sync_batchnorm with --dist.sync_within node synchronizes it inside nodes",
        )

    return groups


def refuse_sync_batchnorm(model: nn.Module, reason: str, *, instead: str) -> None:
    """`reason` and `instead` end the two sentences of the error."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"the model's {name} is a SyncBatchNorm, but {reason}",
                next_step=f"use nn.BatchNorm in its place; {instead}",
            )


def _wrap(
    config: Config,
    model: nn.Module,
    ddp: RunManager,
    groups: ReplicaGroups | None,
) -> nn.Module:
    """The model under DDP, with the options of the settings; without reductions where the step
    makes them."""
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
        static_graph=dist.static_graph,
        comm="none" if dist.comm == "powersgd" else dist.comm,
    )


def _build_data(
    config: Config,
    task: Task,
    ddp: RunManager,
    batch: GlobalBatch,
    plan: ShardingPlan | None,
) -> tuple[AnyLoader, dict[str, EvaluationLoader], str]:
    """Collective: the loaders for training and evaluation, and the fingerprint of the training
    data. Data that differs across ranks is refused, and in the elastic mode machines that do."""
    train_data = task.train_data()
    eval_sets = evaluation_sets(task)
    data_fingerprint = fingerprint(train_data)
    ranks_of_a_model = 1 if plan is None else plan.num_shards

    facts = {
        "the training data": data_fingerprint,
        **evaluation_facts(eval_sets),
        "the number of ranks that hold one model": ranks_of_a_model,
    }

    if config.train.exact == "elastic":
        facts |= {f"the {name}": value for name, value in platform_facts(ddp.device).items()}

    check_same_data(ddp, facts)

    loader: AnyLoader = ddp.loader(  # type: ignore[assignment]
        train_data,
        batch_size=batch.size,
        accumulate=batch.accumulate,
        micro_batch_size=batch.micro_batch_size,
        shards=config.train.shards if config.train.exact == "elastic" else None,
        resident=config.data.resident,
        compare=False,  # that was done for all data at once
        **loading_options(config, task),
    )

    loader.count_tokens = task.num_tokens
    return loader, make_eval_loaders(config, task, ddp, eval_sets), data_fingerprint


def _power_sgd(settings: DistConfig, applied: nn.Module) -> PowerSGD | None:
    """The reduction by PowerSGD, if it is set and there is somebody to send to."""
    if settings.comm != "powersgd" or not isinstance(applied, DistributedDataParallel):
        return None
    if get_world_size() == 1:
        return None
    return PowerSGD(applied, columns=settings.powersgd_rank, start=settings.powersgd_start)


def leave_default_stream(device: torch.device, step_kind: str) -> None:
    """Make a new stream current, for steps that may be captured: CUDA cannot capture the default
    stream, and a step must be captured on the stream of its warm-up. Call it before the model is
    built: autograd remembers each parameter's first stream."""
    if device.type != "cuda" or step_kind not in CAPTURING:
        return

    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(device))
        torch.cuda.set_stream(stream)


def _warn_about_data(
    config: Config,
    ddp: RunManager,
    loader: AnyLoader,
    model: nn.Module,
    batch_size: int,
) -> None:
    """Report data with which an epoch would fail at its end, or a run would never be saved."""
    num_samples = loader.num_samples
    if num_samples is not None and num_samples % batch_size == 1 and has_batchnorm(model):
        log.warning(
            f"the last batch of every epoch has one sample ({num_samples} samples in batches of {batch_size}): "
            "BatchNorm has no statistics for it, and some of its layers refuse it; choose another batch size"
        )

    has_no_epochs = loader.stream_state() is not None
    if has_no_epochs and not config.checkpoint.every_steps and ddp.is_main_process():
        log.warning(
            "training data with a state_dict has no epochs, so nothing is saved before the end: set "
            "--checkpoint.every_steps"
        )


def check_streams(job: Job) -> None:
    """Collective: compare the next sample of the training stream across ranks, without taking it.
    In a plain iterable it must be the same on every rank, in a stream with its own state it must
    not."""
    loader = job.loader
    ddp = job.ddp
    if not isinstance(loader, StreamLoader) or ddp.world_size == 1:
        return

    digest = loader.peek()
    if not loader.is_resumable:
        check_same(
            {f"the next sample of the stream {loader.name}": digest},
            host=ddp.host,
            next_step="let every rank read the same samples in the same order: Drumline splits them; shuffle "
            "with the global generators or by set_epoch(epoch), which are the same on every rank",
        )
    elif len(set(gather_json(digest))) == 1 and ddp.is_main_process():
        log.warning(
            f"all {ddp.world_size} ranks read the same next sample of the stream {loader.name}: Drumline does not "
            "split a stream with a state_dict; let it choose its samples by rank, or all ranks train on the same ones"
        )


def count_steps(job: Job, train: TrainConfig, progress: Progress) -> int:
    """How many steps the run has in all, as seen from `progress`: no more where a hook has stopped
    it, unless the user has made the run longer since."""
    length = run_length(train)
    stopped = progress.stopped
    if stopped is None or stopped["unit"] != length["unit"]:
        return steps_of_settings(job, train, progress)

    # Not by the number of steps, which a smaller batch raises, too.
    if length["length"] > stopped["length"]:
        return steps_of_settings(job, train, progress)

    return progress.step


def run_length(train: TrainConfig) -> dict[str, Any]:
    """How long the settings want the run to be: its `unit`, steps or epochs, and the `length` in
    it: `{"unit": "epochs", "length": 10}`."""
    if train.steps is not None:
        return {"unit": "steps", "length": train.steps}
    return {"unit": "epochs", "length": train.epochs or 1}


def steps_of_settings(job: Job, train: TrainConfig, progress: Progress) -> int:
    """How many steps the settings ask for. Epochs are passes over the data, so if the user has
    changed the batch since, the remaining epochs have a different number of steps."""
    if train.steps is not None:
        return train.steps

    if isinstance(job.loader, StreamLoader):
        raise UsageError(
            f"the length of the stream {job.loader.name} is unknown, so train.epochs does not say how long to train",
            next_step="give --train.steps",
        )

    epochs_left = (train.epochs or 1) - progress.cursor.epoch
    if epochs_left <= 0:
        return progress.step

    samples_left_in_epoch = job.loader.num_samples - progress.cursor.position
    steps_left_in_epoch = -(-samples_left_in_epoch // job.batch.size)
    return progress.step + steps_left_in_epoch + (epochs_left - 1) * job.loader.steps_per_epoch
