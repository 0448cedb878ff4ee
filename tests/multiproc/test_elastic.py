"""`--train.exact elastic`: the same bits on any number of ranks, and the right ones."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drumline.config.schema import Config, DistConfig, OptimConfig
from drumline.training.job import job
from drumline.training.job.job import build_job
from drumline.training.manager import RunManager
from drumline.training.steps.choice import make_step
from drumline.training.tasks.base import Loss, Task
from tests.faults import Fault, die_at
from tests.jobs import (
    NO_SIDECAR,
    Classify,
    Everything,
    Strided,
    WeighTokens,
    make_config,
    newest,
    train_each_on,
    train_here,
    train_on,
)
from tests.multiproc.test_parity import OPTIM, full_batch_weights
from tests.ranks import RanksFailed, run_ranks
from tests.schedules import digest
from tests.stream_jobs import ClassifyStream


class TwoTypes(Classify):
    """Half of the network in double precision: gradients of two types, in several small buckets."""

    def model(self) -> nn.Module:
        return Mixed()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 50).double()
        self.narrow = nn.Linear(50, 2)
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.narrow(self.wide(inputs).tanh().float())
        return scores


class Specialised(Classify):
    """One of its layers is for some batches only, another for none."""

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {name: nn.Linear(6, 2).double() for name in ("always", "seldom", "never")}
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        layers = model if isinstance(model, nn.ModuleDict) else model.module
        assert isinstance(layers, nn.ModuleDict)
        scores = layers["always"](inputs)
        if inputs[0, 0] > 0.5:
            scores = scores + layers["seldom"](inputs)
        return Loss(nn.functional.cross_entropy(scores, targets, reduction="sum"))


def elastic(*, shards: int = 4, dist: DistConfig | None = None, **settings: Any) -> Config:
    config = make_config(exact="elastic", shards=shards, **settings)
    return replace(config, dist=dist or DistConfig(bucket_cap_mb=0.0005))


class Reassigning(Classify):
    """A buffer that is not changed in place, but replaced in every forward pass."""

    def model(self) -> nn.Module:
        return Averaging()


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2).double()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        scores: Tensor = self.linear(inputs - self.mean)
        return scores


class Reentrant(Classify):
    """A layer that is used twice, each time recomputed in a backward pass within the backward
    pass."""

    def model(self) -> nn.Module:
        return Recomputed()


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        scores: Tensor = self.last(hidden)
        return scores


class Synchronised(Classify):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Linear(8, 2)).double()


ADAM = OptimConfig(
    name="adamw", lr=0.01, weight_decay=0.1, schedule="cosine", warmup_steps=2, clip_norm=0.7
)


JOBS: list[tuple[type[Task], dict[str, Any]]] = [
    (
        Everything,
        {
            "batch_size": 32,
            "samples": 70,
            "accumulate": 2,
            "dropout": 0.3,
            "augment": True,
            "epochs": 2,
        },
    ),
    (
        Everything,
        {"batch_size": 24, "samples": 70, "shards": 6, "micro_batch_size": 3, "dropout": 0.3},
    ),
    (WeighTokens, {"accumulate": 2}),
    (TwoTypes, {"batch_size": 10, "shards": 5}),
    (Reassigning, {"accumulate": 2}),
    (Everything, {"samples": 3, "batch_size": 8, "workers": 1, "epochs": 3}),
    (ClassifyStream, {"steps": 12, "accumulate": 2, "dropout": 0.3, "augment": True}),
    (Specialised, {"dist": DistConfig(find_unused_parameters=True), "epochs": 1}),
]


def test_any_number_of_ranks_trains_the_same_bits(tmp_path: Path) -> None:
    for world_size in (1, 2, 3, 4):
        jobs = [
            (
                elastic(optim=ADAM, **{"epochs": 1, **settings}),
                task,
                tmp_path / f"{number} {task.__name__}" / f"{world_size}",
            )
            for number, (task, settings) in enumerate(JOBS)
            # All numbers where there is most to it; the others alone, and on three or on four.
            if world_size in (1, 3 + number % 2) or number == 0
        ]
        train_each_on(world_size, *jobs)
    for folder in tmp_path.iterdir():
        digests = {run.name: digest(run) for run in folder.iterdir()}
        assert len(digests) >= 2
        assert len(set(digests.values())) == 1, (folder.name, digests)


def test_it_trains_like_one_process_on_the_full_batch(tmp_path: Path) -> None:
    config = elastic(accumulate=2, optim=OPTIM)
    tasks = (Classify, WeighTokens, Strided)
    train_each_on(3, *((config, task, tmp_path / task.__name__) for task in tasks))
    for task in tasks:
        expected = full_batch_weights(config, task)
        for name, tensor in newest(tmp_path / task.__name__).tensors["model"].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)


def test_dropout_differs_between_shards_and_steps(tmp_path: Path) -> None:
    """Each shard draws its own: not the same mask again and again."""
    masks = run_ranks(2, masks_of_two_steps)
    assert len({mask for of_rank in masks for mask in of_rank}) == 2 * 2 * 2


def masks_of_two_steps() -> list[str]:
    config = elastic(batch_size=8, samples=16)
    masks = []

    class Masked(Classify):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            masks.append(str(torch.rand(8).tolist()))
            return super().loss(model, batch)

    with RunManager(watch=NO_SIDECAR) as ddp:
        masked = build_job(config, Masked(config), ddp)
        take_step = make_step(masked, config)
        for step in masked.loader.steps():
            take_step(step)
    return masks


def test_a_resume_just_before_a_batch_that_is_too_small_for_all_ranks(tmp_path: Path) -> None:
    """The first step of this process is one in which the last rank has nothing: it still knows what
    to send."""
    config = elastic(batch_size=32, samples=70, epochs=1, checkpoint=None)
    config = replace(config, checkpoint=replace(config.checkpoint, every_steps=1))
    with pytest.raises(RanksFailed):
        run_ranks(4, die_at, Fault("saved", 2, 0), config, WeighedPoints, tmp_path / "killed")
    assert train_on(4, config, WeighedPoints, tmp_path / "killed").step == 3
    train_on(1, config, WeighedPoints, tmp_path / "whole")
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")


class WeighedPoints(Everything):
    """With a weight, which a rank without samples has never seen."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total, weight=batch[0][:, 0].abs().sum(), metrics=loss.metrics)


def test_a_parameter_without_a_gradient_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, train_here, elastic(), Specialised, tmp_path)
    assert any(
        "does not use these parameters: never.weight" in text
        or "does not use these parameters: seldom.weight" in text
        for text in caught.value.errors.values()
    )
    assert any("--dist.find_unused_parameters" in text for text in caught.value.errors.values())


@pytest.mark.soak
def test_the_default_mode_on_many_worlds_is_the_same_run_up_to_rounding(tmp_path: Path) -> None:
    """4 -> 2 -> 3 -> 1: the same samples, and losses that agree to many digits with those of one
    process."""
    legs = ((4, 1), (2, 2), (3, 3), (1, 4))
    for world_size, epochs in legs:
        train_on(world_size, make_config(epochs=epochs, optim=OPTIM), Classify, tmp_path / "legs")
    train_on(1, make_config(epochs=4, optim=OPTIM), Classify, tmp_path / "whole")
    for name, tensor in newest(tmp_path / "whole").tensors["model"].items():
        other = newest(tmp_path / "legs").tensors["model"][name]
        torch.testing.assert_close(other, tensor, rtol=1e-9, atol=1e-12)


def test_a_gradient_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """Half of it would already be under way."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, train_here, elastic(), Reentrant, tmp_path)
    text = "\n".join(caught.value.errors.values())
    assert "the parameter shared.bias got its gradient twice in one backward pass" in text
    assert "use torch.utils.checkpoint with use_reentrant=False" in text


def test_synchronised_batch_statistics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RanksFailed, match=r"the model's 1 is a SyncBatchNorm, but in elastic mode"
    ) as caught:
        run_ranks(1, train_here, elastic(), Synchronised, tmp_path)
    assert "use nn.BatchNorm in its place" in str(caught.value)


@pytest.mark.soak
def test_a_batch_per_rank_keeps_its_bits_on_another_world(tmp_path: Path) -> None:
    def config(epochs: int) -> Config:
        return elastic(
            batch_size_per_rank=8, accumulate=2, samples=70, epochs=epochs, shards=8, optim=OPTIM
        )

    train_on(4, config(1), Everything, tmp_path / "same")
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    train_on(4, config(2), Everything, tmp_path / "same")
    train_on(2, config(2), Everything, tmp_path / "other")
    assert digest(tmp_path / "same") == digest(tmp_path / "other")


def test_ranks_on_unlike_machines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, train_on_another_machine, elastic(), tmp_path)
    for text in caught.value.errors.values():
        assert re.search(
            r"ranks differ in the device: rank 0 \(.*\): kind 0; rank 1 \(.*\): kind 1", text
        )


def train_on_another_machine(config: Config, run: Path) -> None:
    job.platform_facts = lambda device: {"device": f"kind {os.environ['RANK']}"}
    train_here(config, Everything, run)
