"""What is found before the first step: a loss that is a mean, parameters that get no gradient; no
bit changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset

from drumline.base.errors import DrumlineError, UsageError
from drumline.config.schema import DistConfig
from drumline.report.verify.run_check import verify_run
from drumline.runs.events import read_events
from drumline.training import run as engine
from drumline.training.steps.warm_up import is_a_mean
from drumline.training.tasks.base import Loss
from tests.jobs import (
    Classify,
    Everything,
    Points,
    WeighTokens,
    assert_same_bits,
    make_config,
    newest,
    train_here,
    train_on,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("once", "twice", "is_mean"),
    [
        ((5.6, 8), (11.2, 16), False),  # a sum
        ((0.7, 8), (0.7000001, 16), True),
        ((0.7, 30), (0.7, 60), True),  # per token, beside a weight in tokens
        ((0.7, 1), (0.7, 1), False),  # a mean beside a weight of 1: a mean over batches
        ((4.16, 8), (4.9, 16), False),  # samples that have to do with each other
        ((0.0, 8), (0.0, 16), False),
        ((float("nan"), 8), (0.6, 16), False),
        ((0.7, 0), (0.7, 0), False),
    ],
)
def test_only_what_is_surely_a_mean_is_one(
    once: tuple[float, float], twice: tuple[float, float], is_mean: bool
) -> None:
    assert is_a_mean(once, twice) == is_mean


class Mean(Classify):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return Loss(functional.cross_entropy(model(batch[0]), batch[1]))


class MeanOfTokens(WeighTokens):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total / loss.weight, weight=loss.weight)


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        points = Points()
        return ({"inputs": points[number][0], "targets": points[number][1]} for number in range(37))


class MeanOfAStream(Mean):
    def train_data(self) -> Any:
        return Stream()

    def eval_data(self) -> Any:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch["inputs"], batch["targets"]))


@pytest.mark.parametrize("task", [Mean, MeanOfTokens, MeanOfAStream])
def test_a_mean_is_refused_and_the_remedy_is_named(tmp_path: Path, task: type[Classify]) -> None:
    with pytest.raises(
        UsageError, match=rf"^{task.__name__}\.loss\(\) returns a mean, but Loss takes a sum: "
    ) as caught:
        train_here(make_config(steps=2, dropout=0.5), task, tmp_path)
    assert caught.value.next_step == (
        'return Loss.mean(value, count), or use reduction="sum"; if it is a sum, set check_mean = False in '
        f"{task.__name__}"
    )
    assert not (tmp_path / "checkpoints" / "step-00000002").exists()
    assert not (tmp_path / "config.toml").exists(), "no step was trained with these settings"
    assert verify_run(tmp_path, lambda text: None).problems == []


class Converted(Classify):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        sums = super().loss(model, batch)
        count = len(batch[1])
        means = {name: total / count for name, total in sums.metrics.items()}
        return Loss.mean(sums.total / count, count, means)


def test_a_mean_with_its_count_trains_like_the_sum(tmp_path: Path) -> None:
    for task in (Classify, Converted):
        train_here(make_config(accumulate=2), task, tmp_path / task.__name__)
    ours, theirs = (
        newest(tmp_path / task.__name__).tensors["model"] for task in (Classify, Converted)
    )
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name])


@dataclass
class Parcel:
    inputs: Tensor
    targets: Tensor


class InParcels(Mean):
    """A mean, in batches that cannot be cut: not judged."""

    @staticmethod
    def collate(samples: Any) -> Parcel:  # type: ignore[override]
        return Parcel(*(torch.stack(column) for column in zip(*samples, strict=True)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch.inputs, batch.targets))


class RefusesMore(Mean):
    """A mean that only batches of one size have."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if len(batch[0]) == 16:
            raise ValueError("contrasts need 8 samples")
        return super().loss(model, batch)

    def eval_data(self) -> Any:
        return None


class Penalised(Classify):
    """A sum, with a term that does not depend on the batch."""

    check_mean = False

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total + 1e6, metrics=loss.metrics)


class NeedsAllSamples(Classify):
    """Its loss takes whole micro-batches only."""

    def eval_data(self) -> Any:
        return None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return super().loss(model, (batch[0].view(16, 6), batch[1]))


@pytest.mark.parametrize(
    ("task", "batch_size"),
    [
        (InParcels, 8),
        (RefusesMore, 8),
        (Mean, 1),
        (Everything, 8),
        (WeighTokens, 3),
        (Penalised, 8),
        (NeedsAllSamples, 16),
    ],
)
def test_what_is_a_sum_or_not_certain_trains(
    tmp_path: Path, task: type[Classify], batch_size: int
) -> None:
    train_here(make_config(steps=2, batch_size=batch_size, dropout=0.5), task, tmp_path)


class Talks(NeedsAllSamples):
    """A loss with a collective in it, which fails on rank 1 with a few samples."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = Classify.loss(self, model, batch)
        dist.all_reduce(loss.total.detach().clone())
        if len(batch[0]) == 8 and dist.get_rank() == 1:
            raise ValueError("rank 1 needs all samples")
        return loss


@pytest.mark.parametrize("batch_size", [3, 32])
def test_all_ranks_call_the_loss_alike(tmp_path: Path, batch_size: int) -> None:
    """Of 3 samples rank 1 has one, which is too few to judge by."""
    config = make_config(steps=1, batch_size=batch_size, samples=32)
    assert train_on(2, config, Talks, tmp_path).step == 1


def nothing(*arguments: Any, **settings: Any) -> None:
    """In place of the warm-up."""


class Counts(Everything):
    """Its loss and its model count their calls, which the first pass must not be among."""

    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        self.calls += 1
        model.calls = getattr(model, "calls", 0) + 1  # type: ignore[assignment]
        assert model.calls >= self.calls  # type: ignore[operator]
        loss = super().loss(model, batch)
        return Loss(loss.total * (1 + 0.1 * self.calls), metrics=loss.metrics)


def test_the_run_has_the_same_bits_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(dropout=0.3, augment=True)
    train_here(config, Counts, tmp_path / "with")
    monkeypatch.setattr(engine, "warm_up", nothing)
    train_here(config, Counts, tmp_path / "without")
    assert_same_bits(newest(tmp_path / "with"), newest(tmp_path / "without"))


class WithSpare(Classify):
    """A layer that is never used."""

    def model(self) -> nn.Module:
        model = super().model()
        model.add_module("spare", nn.Linear(3, 3).double())
        model.forward = lambda inputs: model[3](model[1](model[0](inputs)))  # type: ignore[method-assign, index, operator]
        return model


class Frozen(WithSpare):
    def model(self) -> nn.Module:
        model = super().model()
        model.spare.requires_grad_(False)  # type: ignore[union-attr, operator]
        return model


class LeavesOut(Classify):
    """In some batches the last bias has no part."""

    def leaves_out(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> bool:
        raise NotImplementedError

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        if not self.leaves_out(model, batch):
            return loss
        scores = functional.linear(model[1](model[0](batch[0])), model[3].weight)
        return Loss(
            functional.cross_entropy(scores, batch[1], reduction="sum"), metrics=loss.metrics
        )


class NotInTraining(LeavesOut):
    def leaves_out(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> bool:
        return model.training


class NotOnRankOne(LeavesOut):
    def leaves_out(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> bool:
        return os.environ["RANK"] == "1"


class NotInEachStep(LeavesOut):
    """In every other one, in turn with the other rank."""

    calls = 0

    def leaves_out(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> bool:
        self.calls += model.training
        return (self.calls + int(os.environ["RANK"])) % 2 == 0


class Reentrant(Classify):
    """Its graph does not show which parameters it uses."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs = batch[0].clone().requires_grad_()
        return super().loss(partial(checkpoint, model, use_reentrant=True), (inputs, batch[1]))  # type: ignore[arg-type]


def notes_of(run: Path) -> list[str]:
    events = read_events(run / "events" / "rank-00000.jsonl")
    return [event["message"] for event in events if event["kind"] == "note"]


def outcomes(folder: Path, *jobs: tuple[type[Classify], dict[str, Any]]) -> list[str]:
    """Of these jobs, one after the other: the error, or what was noted."""
    results = []
    for number, (task, dist_settings) in enumerate(jobs):
        config = replace(make_config(epochs=1), dist=DistConfig(**dist_settings))
        try:
            train_here(config, task, folder / str(number))
        except DrumlineError as error:
            results.append(str(error))
        else:
            results.append(" | ".join(notes_of(folder / str(number))))
    return results


SENTENCE = "the loss does not use these parameters: spare.bias and spare.weight"
FINDS = {"find_unused_parameters": True}
STATIC = {"static_graph": True}


def test_unused_parameters_are_named_before_the_first_step(tmp_path: Path) -> None:
    jobs = [(WithSpare, {}), (NotInTraining, {}), (NotOnRankOne, {})]
    refused, refused_too, by_rank = run_ranks(2, outcomes, tmp_path, *jobs)[0]
    assert refused.startswith(SENTENCE)
    assert (
        "set --dist.find_unused_parameters, or --dist.static_graph if no batch uses them" in refused
    )
    assert refused_too.startswith("the loss does not use these parameters: 3.bias\n")
    assert by_rank.startswith(
        "the parameters that the loss does not use differ across ranks: rank 0 ("
    )
    assert "): none; rank 1 (" in by_rank
    assert "): 3.bias\n  try: use them in every batch" in by_rank


def test_parameters_that_may_be_unused_are_not_named(tmp_path: Path) -> None:
    static = [(WithSpare, STATIC), (NotOnRankOne, STATIC)]
    jobs = [(WithSpare, FINDS), (Frozen, {}), (NotInEachStep, FINDS), (Reentrant, {}), *static]
    assert run_ranks(2, outcomes, tmp_path, *jobs)[0] == [""] * len(jobs)


def test_one_process_continues(tmp_path: Path) -> None:
    noted, sharded, *others = outcomes(
        tmp_path,
        (WithSpare, {}),
        (WithSpare, {"mode": "fsdp"}),
        (Frozen, {}),
        (Reentrant, {}),
        (Classify, FINDS),
    )
    assert noted.startswith(f"{SENTENCE}; on several ranks this stops the run: ")
    assert SENTENCE not in sharded
    assert others == ["", "", ""]


class Perceptrons(Classify):
    """More linear layers in lists than blocks."""

    def model(self) -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6)) for _ in range(4))
        return nn.Sequential(*blocks, nn.Linear(6, 2)).double()


def test_recomputation_is_logged(tmp_path: Path) -> None:
    config = make_config(steps=1)
    config = replace(config, model=replace(config.model, activation_checkpointing=True))
    train_here(config, Perceptrons, tmp_path / "blocks")
    train_here(replace(config, dist=DistConfig(wrap=("Linear",))), Perceptrons, tmp_path / "layers")
    assert "recompute: 4 x Sequential" in notes_of(tmp_path / "blocks")
    assert "recompute: 9 x Linear" in notes_of(tmp_path / "layers")
