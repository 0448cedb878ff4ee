"""The parts of a run on one rank, built in the order that distributed training needs, and checked against the others.

Seeded alike, the model is built; it goes to its device and is compared across ranks before it is wrapped; the
optimizer gets the parameters where they then are.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from drumline.config.schema import Config, TrainConfig
from drumline.data.evaluation_loader import AnyEvaluationLoader
from drumline.data.fingerprint import fingerprint
from drumline.data.loader import AnyLoader
from drumline.data.sharding import Cursor
from drumline.data.stream_loader import StreamLoader
from drumline.distributed.agree import check_same
from drumline.distributed.buffers import LiveBuffers
from drumline.distributed.determinism import machine_facts
from drumline.distributed.wrap import gains_from_channels_last, has_batchnorm, unwrap_model
from drumline.engine.batch import Batch, choose_batch
from drumline.engine.optimizer import make_optimizer
from drumline.engine.precision import make_autocast, make_scaler, set_arithmetic
from drumline.engine.schedule import scaled_rate
from drumline.engine.start_clock import StartClock
from drumline.engine.steps.capture_stream import CAPTURING, is_captured, leave_default_stream
from drumline.engine.steps.captured import CapturedStep
from drumline.engine.steps.finite import FiniteSteps
from drumline.errors import UsageError
from drumline.log import log
from drumline.manager import DDPManager
from drumline.metrics.meters import Meter, check_names
from drumline.tasks.base import Task
from drumline.watch.beats.phase import Phase


@dataclass(frozen=True)
class Job:
    """What the step, the loop, evaluation and checkpoints work on."""

    task: Task
    ddp: DDPManager
    model: nn.Module
    """The task's own, on the device."""
    applied: nn.Module
    """The model as it is trained: takes a function of it, and its arguments; under DDP where there is a group."""
    optimizer: Optimizer
    peak_lr: float
    scaler: GradScaler | None
    autocast: AbstractContextManager[object]
    loader: AnyLoader
    eval_loader: AnyEvaluationLoader | None
    meter: Meter
    finite: FiniteSteps
    batch: Batch
    data_fingerprint: str
    captured_steps: WeakSet[CapturedStep] = field(default_factory=WeakSet)
    """Those that are still in use."""

    def reported(self, means: dict[str, float]) -> dict[str, float]:
        """What the task makes of the means, for the log."""
        numbers = self.task.report(means)
        check_names(numbers)
        return numbers

    def close(self) -> None:
        """Release captured steps, which must not outlive the process group, and end the processes that load data."""
        for captured in self.captured_steps:
            captured.release()
        self.loader.close()
        if self.eval_loader is not None:
            self.eval_loader.close()


def make_manager(config: Config, task: str = "", *, run: Path | None = None) -> DDPManager:
    """The rank's place in the group, as the settings want it. `task`: as the user named it. `run`: its folder."""
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
        # The task's file may lie in another folder on each node.
        settings={**settings, "TASK": task.rpartition("/")[2]},
        same_code=config.dist.same_code,
        watch=config.watch,
        run=run,
    )


def build_job(
    config: Config,
    task: Task,
    ddp: DDPManager,
    batch: Batch | None = None,
    clock: StartClock | None = None,
) -> Job:
    """Collective: build model, data and optimizer, and make sure that every rank has the same. `batch`: that of the run
    that is gone on with; else the settings say. `clock`: is told what took the time."""
    ddp.beat.mark(Phase.START)
    set_arithmetic(config.train, ddp.device)
    is_in_graph = is_captured(config.train.step, ddp.device)
    if is_in_graph:
        leave_default_stream(ddp.device)
    batch = batch or choose_batch(config.train, world_size=ddp.world_size)
    train_data, eval_data = task.train_data(), task.eval_data()
    data_fingerprint = fingerprint(train_data)
    _check_same_data(config, ddp, data_fingerprint, None if eval_data is None else fingerprint(eval_data))
    loader, eval_loader = _make_loaders(config, task, ddp, batch, train_data, eval_data)
    if clock is not None:
        clock.mark("data")
    applied = _wrap(config, task.model(), ddp)
    model = unwrap_model(applied)
    _warn_of_a_lonely_sample(model, loader.num_samples, batch.size)
    if loader.state_dict() is not None and not config.checkpoint.every_steps and ddp.is_main_process():
        log.warning(
            "training data with a state_dict has no epochs, so nothing is saved before the end: set "
            "--checkpoint.every_steps"
        )
    peak_lr = scaled_rate(config.optim.lr, rule=config.optim.scale_lr, world_size=batch.num_shares)
    optimizer = make_optimizer(model, config.optim, lr=peak_lr, in_graph=is_in_graph)
    scaler, meter = make_scaler(config.train.precision, ddp.device), Meter(ddp.device)
    return Job(
        task=task,
        ddp=ddp,
        model=model,
        applied=applied,
        optimizer=optimizer,
        peak_lr=peak_lr,
        scaler=scaler,
        autocast=make_autocast(config.train.precision, ddp.device),
        loader=loader,
        eval_loader=eval_loader,
        meter=meter,
        finite=FiniteSteps(
            config.train.on_nan,
            meter=meter,
            buffers=LiveBuffers(model),
            optimizer=optimizer,
            scaler=scaler,
            device=ddp.device,
            waits_for_device=ddp.device.type != "cpu",
        ),
        batch=batch,
        data_fingerprint=data_fingerprint,
    )


def count_steps(job: Job, train: TrainConfig, *, step: int, cursor: Cursor) -> int:
    """How many steps the run has in all, from where it stands. Epochs are passes over the data, so if the user has
    changed the batch on the way, what is left of them is another number of steps."""
    if train.steps is not None:
        return train.steps
    if isinstance(job.loader, StreamLoader):
        raise UsageError(
            f"the length of the stream {job.loader.name} is not known, so epochs do not say how long to train",
            next_step="give --train.steps",
        )
    epochs_left = (train.epochs or 1) - cursor.epoch
    if epochs_left <= 0:
        return step
    steps_left_in_epoch = -(-(job.loader.num_samples - cursor.position) // job.batch.size)
    return step + steps_left_in_epoch + (epochs_left - 1) * job.loader.steps_per_epoch


def _make_loaders(
    config: Config, task: Task, ddp: DDPManager, batch: Batch, train_data: Any, eval_data: Any
) -> tuple[AnyLoader, AnyEvaluationLoader | None]:
    data = config.data
    loading: dict[str, Any] = {
        "workers": data.workers,
        "pin_memory": data.pin_memory,
        "persistent_workers": data.persistent_workers,
        "prefetch_factor": data.prefetch_factor,
        "collate": task.collate,
        "compare": False,  # build_job has done it for all data at once
    }
    loader = ddp.loader(
        train_data,
        batch_size=batch.size,
        accumulate=batch.accumulate,
        micro_batch_size=batch.micro_batch_size,
        shards=config.train.shards if config.train.exact == "elastic" else None,
        resident=data.resident,
        **loading,
    )
    if eval_data is None:
        return loader, None
    return loader, ddp.loader(eval_data, batch_size=config.train.eval_batch_size, train=False, **loading)


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
    """cuDNN's tensor cores want the channels last; on the CPU that gains little."""
    if train.memory_format == "auto":
        return device.type == "cuda" and gains_from_channels_last(model)
    return train.memory_format == "channels_last"


def _warn_of_a_lonely_sample(model: nn.Module, num_samples: int | None, batch_size: int) -> None:
    if num_samples is not None and num_samples % batch_size == 1 and has_batchnorm(model):
        log.warning(
            f"the last batch of every epoch has a single sample ({num_samples} samples in batches of {batch_size}), of "
            "which BatchNorm has no statistics and which some of its layers refuse: choose another batch size"
        )


def flat(config: Config) -> dict[str, Any]:
    """The settings by their dotted names, in JSON's types."""
    sections = json.loads(json.dumps(asdict(config)))
    return {
        f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()
    }


def _check_same_data(config: Config, ddp: DDPManager, train_data: str, eval_data: str | None) -> None:
    """What differs here would otherwise be a hang, or two runs that only look like one. Versions, settings and code
    were compared when the ranks met."""
    is_elastic = config.train.exact == "elastic"
    machine = (
        {f"the {name}": value for name, value in machine_facts(ddp.device).items()} if is_elastic else {}
    )
    check_same(
        {"the training data": train_data, "the evaluation data": eval_data, **machine},
        host=ddp.host,
        device=ddp.device,
        next_step="start every rank with the same command, packages and data (data.dir alone may differ)",
    )
