"""Settings that take one of several names: each has a branch of its own, and a new one is never
taken for another."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drumline.base.errors import PreflightError, UsageError
from drumline.base.json_output import FORMAT, wrap_output
from drumline.checkpoint.writer import is_writer
from drumline.cli.train_rank import live_nodes
from drumline.config.fields import FIELDS
from drumline.config.schema import (
    CheckpointConfig,
    Config,
    DistConfig,
    OptimConfig,
    TrainConfig,
    WatchConfig,
)
from drumline.metrics.meters import Meter
from drumline.parallel.comm_hook import rounding_hook
from drumline.parallel.outer_sync import make_sync
from drumline.parallel.replica_groups import BLOCK, decode, encode
from drumline.parallel.replicas import ReplicaComparison
from drumline.parallel.wrap import LiveBuffers
from drumline.rank.watched.job_connection import JobConnection
from drumline.training.between_steps.saver import Saver
from drumline.training.job.evaluation_job import is_channels_last, make_autocast, set_arithmetic
from drumline.training.job.job import _make_groups, plan_sharding
from drumline.training.job.optimizer import FiniteSteps, peak_rate, rate_factor
from drumline.training.manager import choose_device
from drumline.training.output import make_display
from drumline.training.steps.choice import make_step
from drumline.watch.sidecar.sidecar_options import SidecarOptions

NAMES = {
    "data.token_type": ("uint8", "uint16", "uint32"),
    "data.balance": ("off", "auto"),
    "optim.scale_lr": ("none", "linear", "sqrt"),
    "optim.schedule": ("constant", "linear", "cosine", "step"),
    "train.exact": ("world", "elastic"),
    "train.step": ("eager", "compile", "graph", "compiled_graph", "auto"),
    "train.memory_format": ("auto", "contiguous", "channels_last"),
    "train.tf32": ("auto", "on", "off"),
    "train.precision": ("fp32", "bf16", "fp16"),
    "train.on_nan": ("stop", "skip", "warn"),
    "dist.device": ("auto", "cpu", "cuda"),
    "dist.backend": ("auto", "nccl", "gloo"),
    "dist.mode": ("ddp", "zero1", "fsdp", "hsdp", "auto"),
    "dist.shard_dtype": ("fp32", "bf16"),
    "dist.comm": ("none", "bf16", "fp16", "powersgd"),
    "dist.sync_within": ("none", "node"),
    "dist.outer_dtype": ("fp32", "bf16", "int8"),
    "dist.on_lost_node": ("restart", "continue"),
    "checkpoint.when_busy": ("wait", "skip"),
    "checkpoint.writers": ("one", "nodes", "ranks"),
    "watch.on_difference": ("stop", "broadcast"),
    "watch.sidecar": ("auto", "on", "off"),
    "watch.on_hang": ("restart", "stop", "report"),
    "log.display": ("auto", "live", "plain", "none"),
    "log.format": ("text", "json"),
    "log.trackers": ("wandb", "mlflow", "tensorboard"),
}
NEW: Any = "a new name"
CPU = torch.device("cpu")


def names_in(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    for inner in get_args(annotation):
        yield from names_in(inner)


def test_all_names_are_here() -> None:
    """A new name fails here, so that whoever adds it looks for the places that read the setting;
    the others find it missing in a table, or mypy does, with `assert_never`."""
    names_of = {path: tuple(names_in(field.annotation)) for path, field in FIELDS.items()}
    assert {path: names for path, names in names_of.items() if names} == NAMES


def schedule(name: Any) -> float:
    optim = OptimConfig(schedule=name, final_lr_ratio=0.1, step_every=10, step_factor=0.3)
    return rate_factor(optim, 25, total_steps=100)


def finite_steps(name: Any) -> FiniteSteps:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    return FiniteSteps(
        name, Meter(CPU), LiveBuffers(model), optimizer, None, waits_for_device=False
    )


def plan_with(**settings: Any) -> Any:
    rank: Any = SimpleNamespace(world_size=4, local_world_size=2, device=CPU, train_timeout_s=1.0)
    return plan_sharding(Config(dist=DistConfig(**settings)), rank)


def is_watched(name: Any, world_size: int) -> bool:
    connection: Any = SimpleNamespace(
        topology=SimpleNamespace(world_size=world_size, rank=0, host="a")
    )
    with JobConnection.node_watch(
        connection, WatchConfig(sidecar=name), run=None, environment={}
    ) as watch:
        return watch is not None


def on_wire(name: Any) -> torch.Tensor:
    rows = torch.linspace(-1, 1, 2 * BLOCK).view(2, BLOCK)
    return decode(encode(rows, name), name, torch.float32)


def sidecar_ends_job(name: Any) -> bool:
    options = SidecarOptions(
        folder="", owns_folder=False, node=0, host="a", ranks=(0,), world_size=1, on_hang=name
    )
    return options.ends_job


def step_for(name: Any) -> Any:
    job: Any = SimpleNamespace(
        ddp=SimpleNamespace(device=CPU), optimizer=SGD([nn.Parameter(torch.ones(1))]), step_kind=NEW
    )
    return make_step(job, Config(train=TrainConfig(exact=name)))


def test_a_schedule_has_its_own_curve() -> None:
    """After a quarter of the run: none is the curve of another."""
    factors = {name: schedule(name) for name in NAMES["optim.schedule"]}
    assert factors == {
        "constant": 1.0,
        "linear": pytest.approx(0.775),
        "cosine": pytest.approx(0.868198),
        "step": pytest.approx(0.09),
    }


def test_every_name_does_something_else() -> None:
    assert [
        peak_rate(OptimConfig(lr=0.1, scale_lr=name), world_size=4)
        for name in ("none", "linear", "sqrt")
    ] == [0.1, 0.4, 0.2]
    assert {name: finite_steps(name).skips for name in ("stop", "skip", "warn")} == {
        "stop": False,
        "skip": True,
        "warn": False,
    }
    assert {name: finite_steps(name).keeps_weights for name in ("stop", "skip", "warn")} == {
        "stop": True,
        "skip": True,
        "warn": False,
    }
    plans = {name: plan_with(mode=name) for name in ("ddp", "zero1", "fsdp", "hsdp")}
    assert {name: plan and (plan.mode, plan.num_shards) for name, plan in plans.items()} == {
        "ddp": None,
        "zero1": ("zero1", 4),
        "fsdp": ("fsdp", 4),
        "hsdp": ("hsdp", 2),
    }
    assert [plan_with(mode="fsdp", shard_dtype=name).dtype for name in ("fp32", "bf16")] == [
        None,
        torch.bfloat16,
    ]
    assert {
        (name, size): is_watched(name, size) for name in ("auto", "on", "off") for size in (1, 2)
    } == {
        ("auto", 1): False,
        ("auto", 2): True,
        ("on", 1): True,
        ("on", 2): True,
        ("off", 1): False,
        ("off", 2): False,
    }
    assert [is_writer(name, local_rank=1) for name in ("one", "nodes", "ranks")] == [
        False,
        False,
        True,
    ]
    assert [is_writer(name, local_rank=0) for name in ("nodes", "ranks")] == [True, True]
    assert {name: sidecar_ends_job(name) for name in NAMES["watch.on_hang"]} == {
        "restart": True,
        "stop": True,
        "report": False,
    }
    displays = {
        name: type(make_display(name, io.StringIO())).__name__
        for name in ("auto", "live", "plain", "none")
    }
    assert displays == {
        "auto": "PlainDisplay",
        "live": "LiveDisplay",
        "plain": "PlainDisplay",
        "none": "Display",
    }
    layouts = [
        is_channels_last(TrainConfig(memory_format=name), nn.Conv2d(1, 1, 1), CPU)
        for name in ("auto", "contiguous", "channels_last")
    ]
    assert layouts == [False, False, True]
    hooks = {rounding_hook(name) for name in ("bf16", "fp16")}
    assert len(hooks) == 2
    messages = {name: on_wire(name) for name in ("fp32", "bf16", "int8")}
    errors = {
        name: float((message - messages["fp32"]).abs().max()) for name, message in messages.items()
    }
    assert errors["fp32"] == 0
    assert 0 < errors["bf16"] < 0.01
    assert 0 < errors["int8"] < 0.01
    assert errors["bf16"] != errors["int8"]


def groups_with(name: Any) -> object:
    rank: Any = SimpleNamespace(
        world_size=2, connection=SimpleNamespace(rendezvous=SimpleNamespace(nodes=((0, 1),)))
    )
    return _make_groups(DistConfig(sync="local:2", sync_within=name), nn.Linear(1, 1), rank)


def save_while_busy(name: Any) -> object:
    saver: Any = SimpleNamespace(_settings=CheckpointConfig(when_busy=name))
    return Saver._skips(saver, 1, {}, must_save=False)


def resolve_difference(name: Any) -> object:
    check: Any = SimpleNamespace(on_difference=name, last_agreed=None)
    difference: Any = SimpleNamespace(
        same_kinds=True, sentence=lambda *_: "they differ", place=lambda _: None
    )
    return ReplicaComparison._resolve(check, difference, {}, 1)


def print_as(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORMAT, name)
        wrap_output()


PLACES: dict[str, Callable[[], object]] = {
    "optim.schedule": lambda: schedule(NEW),
    "optim.scale_lr": lambda: peak_rate(OptimConfig(scale_lr=NEW), world_size=2),
    "train.exact": lambda: step_for(NEW),
    "train.step": lambda: step_for("world"),
    "train.memory_format": lambda: is_channels_last(
        TrainConfig(memory_format=NEW), nn.Linear(1, 1), CPU
    ),
    "train.tf32": lambda: set_arithmetic(TrainConfig(tf32=NEW), torch.device("cuda")),
    "train.precision": lambda: make_autocast(NEW, CPU),
    "train.on_nan": lambda: finite_steps(NEW),
    "dist.device": lambda: choose_device(NEW, local_rank=0),
    "dist.mode": lambda: plan_with(mode=NEW),
    "dist.shard_dtype": lambda: plan_with(mode="fsdp", shard_dtype=NEW),
    "dist.comm": lambda: rounding_hook(NEW),
    "dist.sync": lambda: make_sync(DistConfig(sync=NEW), nn.Linear(1, 1), SimpleNamespace()),  # type: ignore[arg-type]
    "dist.outer_dtype": lambda: on_wire(NEW),
    "dist.on_lost_node": lambda: live_nodes(
        None, replace(Config(), dist=DistConfig(on_lost_node=NEW)), folder=Path()
    ),
    "dist.sync_within": lambda: groups_with(NEW),
    "checkpoint.when_busy": lambda: save_while_busy(NEW),
    "watch.on_difference": lambda: resolve_difference(NEW),
    "checkpoint.writers": lambda: is_writer(NEW, local_rank=1),
    "watch.sidecar": lambda: is_watched(NEW, 2),
    "watch.on_hang": lambda: sidecar_ends_job(NEW),
    "log.display": lambda: make_display(NEW, io.StringIO()),
    "log.format": lambda: print_as(NEW),
}


@pytest.mark.parametrize("path", PLACES)
def test_a_name_without_a_branch_is_an_error(path: str) -> None:
    with pytest.raises(
        (AssertionError, KeyError, ValueError, UsageError, PreflightError), match=NEW
    ):
        PLACES[path]()


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        choose_device("gpu", local_rank=0)
    assert str(caught.value) == (
        "the device is 'gpu': it takes auto, cpu or cuda\n  try: give one of them; with cuda each rank of a machine "
        "takes a GPU of its own"
    )
