"""The parts of a run on one rank, built in the order that distributed training needs, and compared across ranks.

All ranks build the model from the same seed; it is moved to its device and compared before it is wrapped; the optimizer
is built from the parameters on the device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from drumline.config.schema import Config, TrainConfig
from drumline.data.dataset import fingerprint
from drumline.data.evaluation_loader import EvaluationLoader
from drumline.data.sharding import Cursor
from drumline.data.stream_loader import AnyLoader, StreamLoader
from drumline.distributed.collectives import check_same, gather_json
from drumline.distributed.determinism import platform_facts
from drumline.distributed.wrap import LiveBuffers, gains_from_channels_last, has_batchnorm, unwrap_model
from drumline.engine.optimizer import (
    FiniteSteps,
    LearningRates,
    check_own_optimizer,
    make_capturable,
    make_optimizer,
    peak_rate,
)
from drumline.engine.task_metrics import make_metrics
from drumline.errors import UsageError, log
from drumline.manager import DDPManager
from drumline.metrics.meters import Meter, check_names
from drumline.tasks.base import Metric, Task
from drumline.watch.heartbeat import HeartbeatWriter, Phase

CAPTURING = ("graph", "compiled_graph", "auto")
"""The values of `train.step` that capture a graph, or may do so."""


@dataclass
class Progress:
    """How far a run is. Only the loop and its actions change it."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    saved_step: int | None = None
    """The step of the newest checkpoint that this start has begun to write, or None."""
    is_stopping: bool = False
    """The run was preempted, and ends before its last step."""
    last_step: int = sys.maxsize
    """The run ends after it."""
    stopped: dict[str, Any] | None = None
    """A hook has ended the run: its `reason`, and the `total_steps` that the run would have had."""


@dataclass(frozen=True)
class GlobalBatch:
    """The batch of one optimizer step."""

    size: int
    """Samples over all ranks."""
    accumulate: int
    micro_batch_size: int | None
    num_shares: int
    """The number of ranks when the run began; the rate may be scaled by it."""
    note: str | None = None
    """A note for the log."""


@dataclass(frozen=True)
class Job:
    """What the step, the loop, evaluation and checkpoints work on."""

    task: Task
    ddp: DDPManager
    model: nn.Module
    """The task's own model, on the device."""
    applied: nn.Module
    """The wrapped model, called with a function of the model and its arguments; under DDP if there is a group."""
    optimizer: Optimizer
    rates: LearningRates
    scaler: GradScaler | None
    autocast: AbstractContextManager[object]
    loader: AnyLoader
    eval_loaders: Mapping[str, EvaluationLoader]
    """The evaluation sets by name; a single one is called ''."""
    metrics: Mapping[str, Metric]
    """The task's own, for evaluations."""
    meter: Meter
    finite: FiniteSteps
    batch: GlobalBatch
    data_fingerprint: str
    uncapturable: str | None = None
    """Why the optimizer's step cannot be captured in a CUDA graph, as the end of a sentence; None: it can."""
    captured_steps: WeakSet[Any] = field(default_factory=WeakSet)
    """The steps of `steps/graph.py` that are still in use."""

    @property
    def heartbeat(self) -> HeartbeatWriter:
        return self.ddp._connection.heartbeat

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
        """Release captured steps, which must not outlive the process group, and end the processes that load data."""
        for captured in self.captured_steps:
            captured.release()
        for loader in (self.loader, *self.eval_loaders.values()):
            loader.close()


def make_manager(config: Config, task: str = "", *, run: Path | None = None) -> DDPManager:
    """This rank's DDPManager, from the settings. `task`: the user's name for it. `run`: its folder."""
    is_elastic = config.train.exact == "elastic"
    settings = {name: value for name, value in flat(config).items() if name != "data.dir"}
    return DDPManager(
        device=config.dist.device,
        backend=config.dist.backend,
        start_timeout_s=config.dist.start_timeout_s,
        train_timeout_s=config.dist.train_timeout_s,
        seed=config.train.seed,
        deterministic=config.train.deterministic or is_elastic,
        captures=config.train.step in CAPTURING,
        threads=config.dist.threads or (1 if is_elastic else None),
        # The task's file may be in a different folder on each node.
        settings={**settings, "TASK": task.rpartition("/")[2]},
        same_code=config.dist.same_code,
        watch=config.watch,
        run=run,
    )


def flat(config: Config) -> dict[str, Any]:
    """The settings by their dotted names, in JSON's types."""
    sections = json.loads(json.dumps(asdict(config)))
    return {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}


def choose_batch(train: TrainConfig, *, world_size: int, saved: Mapping[str, Any] | None = None) -> GlobalBatch:
    """The global batch, which does not depend on the number of ranks once the run has begun. `saved`: the facts of the
    checkpoint that the run resumes from."""
    per_rank = train.batch_size_per_rank or 1
    size = train.batch_size or per_rank * world_size
    began_with = None if saved is None else saved["config"].get("train.batch_size_per_rank")
    # With a changed batch per rank the user chooses a new global batch.
    if saved is None or train.batch_size is not None or began_with != per_rank or saved["batch_size"] == size:
        return GlobalBatch(size, train.accumulate, train.micro_batch_size, world_size)
    size = int(saved["batch_size"])
    ranks = size // per_rank
    note = (
        f"the global batch stays {size}, as the run began ({per_rank} on each of {ranks} ranks): now "
        f"{size / world_size:.4g} on each of {world_size}"
    )
    if train.exact == "elastic":  # micro-batches belong to the shards, which do not change
        return GlobalBatch(size, train.accumulate, train.micro_batch_size, ranks, note)
    # A rank holds no more samples at once than when the run began.
    most = train.micro_batch_size or -(-per_rank // train.accumulate)
    return GlobalBatch(size, 1, most, ranks, f"{note}, at most {most} at once")


def build_job(
    config: Config,
    task: Task,
    ddp: DDPManager,
    batch: GlobalBatch | None = None,
    *,
    on_data: Callable[[], None] = lambda: None,
    on_model: Callable[[nn.Module], None] | None = None,
) -> Job:
    """Collective: build data, model and optimizer, and compare them across ranks. `batch`: the batch of the resumed
    run; otherwise the settings decide. `on_data` is called when the data is built, `on_model` with the new
    model, before it is compared."""
    ddp._connection.heartbeat.mark(Phase.START)
    device = ddp.device
    set_arithmetic(config.train, device)
    in_graph = device.type == "cuda" and config.train.step in CAPTURING
    if in_graph:
        leave_default_stream(device)
    batch = batch or choose_batch(config.train, world_size=ddp.world_size)
    train_data, eval_sets = task.train_data(), evaluation_sets(task)
    data_fingerprint = fingerprint(train_data)
    _check_same_data(config, ddp, data_fingerprint, {name: fingerprint(data) for name, data in eval_sets.items()})
    loader, eval_loaders = _make_loaders(config, task, ddp, batch, train_data, eval_sets)
    on_data()
    model = task.model()
    if on_model is not None:
        on_model(model)
    applied = _wrap(config, model, ddp)
    model = unwrap_model(applied)
    _warn_about_data(config, ddp, loader, model, batch.size)
    optimizer = _make_optimizer(config, task, model, batch)
    rates = LearningRates(optimizer, config.optim, None if type(task).schedule is Task.schedule else task.schedule)
    skips = config.train.on_nan == "skip"
    # fp16 gradients underflow without a scale; bf16 has the range of fp32 and needs none.
    scaler = GradScaler(device.type) if config.train.precision == "fp16" else None
    meter = Meter(device)
    return Job(
        task=task,
        ddp=ddp,
        model=model,
        applied=applied,
        optimizer=optimizer,
        rates=rates,
        scaler=scaler,
        autocast=make_autocast(config.train.precision, device),
        loader=loader,
        eval_loaders=eval_loaders,
        metrics=make_metrics(task, ddp) if eval_loaders and type(task).metrics is not Task.metrics else {},
        meter=meter,
        finite=FiniteSteps(
            config.train.on_nan, meter, LiveBuffers(model), optimizer, scaler, waits_for_device=device.type != "cpu"
        ),
        batch=batch,
        data_fingerprint=data_fingerprint,
        uncapturable=make_capturable(optimizer, device, skips=skips) if in_graph else None,
    )


def _make_optimizer(config: Config, task: Task, model: nn.Module, batch: GlobalBatch) -> Optimizer:
    """The task's optimizer if it has one, otherwise that of the settings."""
    if (own := task.optimizer(model)) is not None:
        return check_own_optimizer(own, model, maker=f"{type(task).__name__}.optimizer()")
    return make_optimizer(model, config.optim, lr=peak_rate(config.optim, world_size=batch.num_shares))


def leave_default_stream(device: torch.device) -> None:
    """Make a new stream current: CUDA cannot capture the default stream, and a step must be captured on the stream of
    its warm-up. Call it before the model is built: autograd remembers each parameter's first stream."""
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        own.wait_stream(torch.cuda.default_stream(device))
        torch.cuda.set_stream(own)


def set_arithmetic(train: TrainConfig, device: torch.device) -> None:
    """Set TF32 and cuDNN's search for kernels, for the whole process."""
    if device.type != "cuda":
        return
    if train.tf32 != "auto":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = train.tf32 == "on"
    torch.backends.cudnn.benchmark = train.cudnn_benchmark


def make_autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """A context for forward passes, made once and entered in every step. fp32 needs none."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[precision])


def evaluation_sets(task: Task) -> dict[str, Any]:
    """The datasets by name; '' for a single one."""
    found = task.eval_data()
    if isinstance(found, Mapping) and all(isinstance(name, str) for name in found):
        return dict(found)
    return {} if found is None else {"": found}


def _check_same_data(config: Config, ddp: DDPManager, train_data: str, eval_sets: Mapping[str, str]) -> None:
    """Collective. The rendezvous has compared versions, settings and code. Elastic mode also compares the machines."""
    compared = {"the training data": train_data, "the evaluation sets": list(eval_sets)}
    compared |= {f"the evaluation data {name}".rstrip(): data for name, data in eval_sets.items()}
    if config.train.exact == "elastic":
        compared |= {f"the {name}": value for name, value in platform_facts(ddp.device).items()}
    check_same(
        compared,
        host=ddp.host,
        device=ddp.device,
        next_step="start every rank with the same command, packages and data (only data.dir may differ)",
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


def _make_loaders(
    config: Config, task: Task, ddp: DDPManager, batch: GlobalBatch, train_data: Any, eval_sets: Mapping[str, Any]
) -> tuple[AnyLoader, dict[str, EvaluationLoader]]:
    # build_job has compared all data at once.
    loading: dict[str, Any] = {**loading_options(config, task), "compare": False}
    made = ddp.loader(
        train_data,
        batch_size=batch.size,
        accumulate=batch.accumulate,
        micro_batch_size=batch.micro_batch_size,
        shards=config.train.shards if config.train.exact == "elastic" else None,
        resident=config.data.resident,
        **loading,
    )
    return cast(AnyLoader, made), {
        name: ddp.loader(data, batch_size=config.train.eval_batch_size, train=False, **loading)
        for name, data in eval_sets.items()
    }


def _wrap(config: Config, model: nn.Module, ddp: DDPManager) -> nn.Module:
    dist = config.dist
    return ddp.wrap(
        model,
        applied=True,
        channels_last=_is_channels_last(config.train, model, ddp.device),
        reduces_gradients=config.train.exact != "elastic",
        sync_batchnorm=dist.sync_batchnorm,
        find_unused_parameters=dist.find_unused_parameters,
        broadcast_buffers=False,  # the step does it, at its end
        bucket_cap_mb=dist.bucket_cap_mb,
        gradient_as_bucket_view=dist.gradient_as_bucket_view,
        static_graph=dist.static_graph,
    )


def _is_channels_last(train: TrainConfig, model: nn.Module, device: torch.device) -> bool:
    """Tensor cores are faster with channels last; on the CPU it gains little."""
    if train.memory_format == "auto":
        return device.type == "cuda" and gains_from_channels_last(model)
    return train.memory_format == "channels_last"


def _warn_about_data(config: Config, ddp: DDPManager, loader: AnyLoader, model: nn.Module, batch_size: int) -> None:
    num_samples = loader.num_samples
    if num_samples is not None and num_samples % batch_size == 1 and has_batchnorm(model):
        log.warning(
            f"the last batch of every epoch has one sample ({num_samples} samples in batches of {batch_size}): "
            "BatchNorm has no statistics for it, and some of its layers refuse it; choose another batch size"
        )
    if loader.stream_state() is not None and not config.checkpoint.every_steps and ddp.is_main_process():
        log.warning(
            "training data with a state_dict has no epochs, so nothing is saved before the end: set "
            "--checkpoint.every_steps"
        )


def check_streams(job: Job) -> None:
    """Collective: compare the next sample of the training stream across ranks, without taking it. In a plain iterable
    it must be the same on every rank, in a stream with its own state it must not."""
    loader, ddp = job.loader, job.ddp
    if not isinstance(loader, StreamLoader) or ddp.world_size == 1:
        return
    digest = loader.peek()
    if not loader.is_resumable:
        check_same(
            {f"the next sample of the stream {loader.name}": digest},
            host=ddp.host,
            device=ddp.device,
            next_step="let every rank read the same samples in the same order: Drumline splits them; shuffle "
            "with the global generators or by set_epoch(epoch), which are the same on every rank",
        )
    elif len(set(gather_json(digest, device=ddp.device))) == 1 and ddp.is_main_process():
        log.warning(
            f"all {ddp.world_size} ranks read the same next sample of the stream {loader.name}: Drumline does not "
            "split a stream with a state_dict; let it choose its samples by rank, or all ranks train on the same ones"
        )


def count_steps(job: Job, train: TrainConfig, progress: Progress) -> int:
    """How many steps the run has in all, as seen from `progress`: no more where a hook has stopped it, unless the user
    has made the run longer since."""
    total, stopped = _steps_of_settings(job, train, progress), progress.stopped
    return total if stopped is None or total > stopped["total_steps"] else progress.step


def _steps_of_settings(job: Job, train: TrainConfig, progress: Progress) -> int:
    """Epochs are passes over the data, so if the user has changed the batch since, the remaining epochs have a
    different number of steps."""
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
    steps_left_in_epoch = -(-(job.loader.num_samples - progress.cursor.position) // job.batch.size)
    return progress.step + steps_left_in_epoch + (epochs_left - 1) * job.loader.steps_per_epoch
