"""Small jobs that tests train, and ways to run one on several ranks and look at what it left."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline.checkpoint import store
from drumline.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    OptimConfig,
    TrainConfig,
    WatchConfig,
)
from drumline.runs import catalog
from drumline.training.job.job import Progress, make_manager
from drumline.training.run import TrainingRun
from drumline.training.run_context import RunRequest
from drumline.training.tasks.base import Loss, Task
from tests.ranks import run_ranks

NUM_SAMPLES = 37
# To start a sidecar takes longer than most of these jobs train; jobs of real commands (tests/cli)
# have theirs.
NO_SIDECAR = WatchConfig(sidecar="off")


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points with a target that a small network can learn; `jitter` adds augmentation of the naive
    kind."""

    def __init__(self, length: int = NUM_SAMPLES, *, jitter: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(length, 6, generator=generator, dtype=torch.float64)
        self.targets = (self.inputs.sum(1) > 0).long()
        self.jitter = jitter

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(6, dtype=torch.float64) * self.jitter + random.random() * self.jitter
        return self.inputs[index] + noise, self.targets[index]


class Classify(Task):
    """A network in double precision, so that sums in another order still agree to many digits."""

    best_metric = "accuracy"
    higher_is_better = True

    def model(self) -> nn.Module:
        dropout = nn.Dropout(self.config.model.dropout)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), dropout, nn.Linear(8, 2)).double()

    def train_data(self) -> Dataset[Any]:
        return Points(self.config.data.samples, jitter=0.1 if self.config.data.augment else 0.0)

    def eval_data(self) -> Dataset[Any]:
        return Points(29)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        scores = model(inputs)
        return Loss(
            functional.cross_entropy(scores, targets, reduction="sum"),
            metrics={"accuracy": (scores.argmax(1) == targets).sum()},
        )


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 1 to 7 tokens, padded with -1."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = index * 5 % 7 + 1
        tokens = torch.full((7,), -1)
        tokens[:length] = torch.arange(length) * (index + 2) % 11
        return tokens.clamp(min=0), tokens


class WeighTokens(Task):
    """A loss over tokens, of which each batch has another number."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11)).double()

    def train_data(self) -> Dataset[Any]:
        return Sentences()

    def eval_data(self) -> Dataset[Any]:
        return Sentences()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        scores = model(inputs).flatten(0, 1)
        total = functional.cross_entropy(
            scores, targets.flatten(), ignore_index=-1, reduction="sum"
        )
        return Loss(total, weight=(targets >= 0).sum())


class Normalised(Classify):
    """With BatchNorm, whose statistics differ between ranks until they are made the same."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
        ).double()


class Everything(Classify):
    """BatchNorm, dropout, single precision and memory in an odd order: whatever could differ in the
    last bit."""

    def model(self) -> nn.Module:
        dropout = nn.Dropout(self.config.model.dropout)
        model = nn.Sequential(
            nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), dropout, nn.Linear(24, 2)
        )
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        return model

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return super().loss(model, (batch[0].float(), batch[1]))


class Strided(Classify):
    """Parameters that do not lie in memory in the order of their indices."""

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Unflatten(1, (6, 1, 1)),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(8, 2),
        ).double()
        model[4].weight = nn.Parameter(model[4].weight.detach().t().contiguous().t())
        return model.to(memory_format=torch.channels_last)


def make_config(
    *,
    batch_size: int = 8,
    epochs: int = 2,
    samples: int = NUM_SAMPLES,
    accumulate: int = 1,
    optim: OptimConfig | None = None,
    dropout: float = 0.0,
    augment: bool = False,
    workers: int = 0,
    checkpoint: CheckpointConfig | None = None,
    **train_settings: Any,
) -> Config:
    base = Config()
    sized = {"batch_size": batch_size} if "batch_size_per_rank" not in train_settings else {}
    lasting = {"epochs": epochs} if "steps" not in train_settings else {}
    return Config(
        model=type(base.model)(dropout=dropout),
        data=DataConfig(samples=samples, augment=augment, workers=workers),
        optim=optim or OptimConfig(lr=0.1, weight_decay=0.0, schedule="constant", clip_norm=0.5),
        train=TrainConfig(
            accumulate=accumulate, eval_batch_size=5, **sized, **lasting, **train_settings
        ),
        checkpoint=checkpoint or CheckpointConfig(),
        log=LogConfig(every_steps=2, display="none"),
        watch=NO_SIDECAR,
    )


def train_here(
    config: Config, task: type[Task], run: Path, *, fresh: bool = False, name: str = "test"
) -> Progress:
    """Train as the rank that the environment says this process is, or alone."""
    progress = Progress()
    # To read and hash all code that is loaded here takes a while; tests/multiproc/test_preflight.py
    # compares it.
    dist = replace(config.dist, start_timeout_s=60, train_timeout_s=30, same_code=False)
    ddp = make_manager(replace(config, dist=dist))
    ddp.setup()
    try:
        TrainingRun(RunRequest(name, config, run, fresh, (name,)), task, ddp, progress).train()
    finally:
        ddp.cleanup()
    return progress


def train_on(world_size: int, config: Config, task: type[Task], run: Path) -> Progress:
    """Train on a number of ranks, each a process of its own."""
    results: list[Progress] = run_ranks(world_size, train_here, config, task, run)
    return results[0]


def train_each_here(jobs: list[tuple[Config, type[Task], Path]]) -> None:
    """Train one job after the other in this process: a rank takes longer to start than to train."""
    for config, task, run in jobs:
        train_here(config, task, run)


def train_each_on(world_size: int, *jobs: tuple[Config, type[Task], Path]) -> None:
    """Train several jobs in the same processes, one for each rank."""
    run_ranks(world_size, train_each_here, list(jobs))


def newest(run: Path) -> store.Snapshot:
    """What the newest checkpoint of a run holds."""
    path = catalog.newest_valid(run / "checkpoints").path
    assert path is not None, f"{run} has no checkpoint: {sorted(run.iterdir())}"
    return store.read(path)


def assert_same_bits(left: store.Snapshot, right: store.Snapshot) -> None:
    """Every tensor and every number of two checkpoints is the same."""
    assert left.tensors.keys() == right.tensors.keys()
    for file in left.tensors:
        assert left.tensors[file].keys() == right.tensors[file].keys()
        for name, tensor in left.tensors[file].items():
            right_tensor = right.tensors[file][name]
            assert tensor.dtype == right_tensor.dtype
            assert torch.equal(tensor, right_tensor), f"{file}: {name} differs"
    assert left.documents == right.documents
