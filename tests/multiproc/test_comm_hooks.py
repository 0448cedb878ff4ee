"""`--dist.comm`: gradients that are rounded or compressed on their way train nearly the same and
resume bit for bit."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.base.errors import UsageError
from drumline.checkpoint import store
from drumline.checkpoint.optimizer_state import decode_state
from drumline.config.schema import CheckpointConfig, Config, DistConfig, OptimConfig
from drumline.training.manager import RunManager
from drumline.training.tasks.base import Loss
from tests.jobs import (
    NO_SIDECAR,
    Classify,
    assert_same_bits,
    make_config,
    newest,
    train_each_on,
    train_here,
)
from tests.multiproc.test_resume import interrupted_at
from tests.ranks import RanksFailed, run_ranks

EVERY_STEP = CheckpointConfig(every_steps=1, every_epochs=0, keep_last=50, keep_best=0)
AT_THE_END = CheckpointConfig(every_epochs=0)
SGD = OptimConfig(lr=0.1, momentum=0.9, schedule="constant", weight_decay=0.0)


class Wide(Classify):
    """Matrices that are worth compressing, and one whose gradient is zero."""

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        dropout = nn.Dropout(self.config.model.dropout)
        model = nn.Sequential(
            nn.Linear(6, 64), nn.Tanh(), dropout, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )
        model.dead = nn.Parameter(torch.randn(48, 48))
        return model

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, (batch[0].float(), batch[1]))
        return Loss(loss.total + 0.0 * model.dead.sum(), metrics=loss.metrics)


class Scalar(Wide):
    def model(self) -> nn.Module:
        model = super().model()
        model.scale = nn.Parameter(torch.tensor(1.0))
        return model


class Sometimes(Wide):
    """A parameter that only some steps of some ranks use."""

    calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        self.calls += 1
        if self.calls % 3:
            return super().loss(model, batch)
        return Classify.loss(self, model, (batch[0].float(), batch[1]))


def compressed(
    comm: str = "powersgd", *, start: int = 3, columns: int = 2, **dist: Any
) -> DistConfig:
    # Buckets of one matrix each.
    return DistConfig(
        comm=comm, powersgd_start=start, powersgd_rank=columns, bucket_cap_mb=0.005, **dist
    )  # type: ignore[arg-type]


def config_of(dist: DistConfig, **settings: Any) -> Config:
    settings = {"checkpoint": AT_THE_END, "eval_every_epochs": 0, **settings}
    return replace(make_config(optim=SGD, batch_size=12, **settings), dist=dist)


def errors(run: Path, rank: int) -> dict[int, Tensor]:
    """The error feedback of a rank in the newest checkpoint, by bucket."""
    saved = newest(run)
    state = decode_state(
        saved.documents["comm"]["ranks"][rank], lambda name: saved.tensors["comm"][f"{rank}/{name}"]
    )
    return {index: bucket["error"] for index, bucket in state.items()}


@pytest.mark.soak
def test_powersgd_is_killed_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    config = config_of(
        compressed(), steps=7, dropout=0.3, augment=True, accumulate=2, checkpoint=EVERY_STEP
    )
    interrupted_at(5, 2, config, Wide, tmp_path / "killed")
    train_each_on(2, *((config, Wide, tmp_path / run) for run in ("killed", "whole")))
    assert_same_bits(newest(tmp_path / "killed"), newest(tmp_path / "whole"))
    first, second = (errors(tmp_path / "whole", rank) for rank in range(2))
    assert len(first) > 2, "several buckets, which torch's hook alone would not survive on gloo"
    assert all(torch.isfinite(one).all() for one in first.values())
    assert any(not torch.equal(first[index], second[index]) for index in first), (
        "each rank has its own"
    )


@pytest.mark.soak
def test_gradients_that_are_compressed_train_nearly_the_same(tmp_path: Path) -> None:
    runs = {
        "none": compressed("none"),
        "bf16": compressed("bf16"),
        "fp16": compressed("fp16"),
        "powersgd": compressed(),
        "later": compressed(start=1000),
        "static": compressed(static_graph=True),
        "unused": compressed(find_unused_parameters=True),
    }
    tasks = {"unused": Sometimes}
    train_each_on(
        2,
        *(
            (config_of(d, steps=20), tasks.get(run, Wide), tmp_path / run)
            for run, d in runs.items()
        ),
    )
    weights = {run: newest(tmp_path / run).tensors["model"] for run in runs}
    begin = dict(Wide(config_of(compressed("none"))).model().state_dict())

    def distance(run: str) -> float:
        """From the run that sends all of its gradients, relative to the way it went."""
        plain = weights["none"]
        apart = sum(float((weights[run][name] - plain[name]).square().sum()) for name in plain)
        return (
            apart / sum(float((begin[name] - plain[name]).square().sum()) for name in plain)
        ) ** 0.5

    assert 0 < distance("fp16") < 0.002
    assert 0 < distance("bf16") < 0.02
    assert 0.001 < distance("powersgd") < 0.3
    assert distance("static") == distance("powersgd")
    assert distance("unused") < 0.3
    assert distance("later") == 0, (
        "nothing is compressed before dist.powersgd_start, and the warm-up is no step"
    )
    assert "comm" not in newest(tmp_path / "bf16").documents


def resumed_messages(run: Path, configs: list[Config]) -> list[list[str]]:
    """Resume a run once with each config; what is logged as a warning each time."""
    results: list[list[str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: results[-1].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drumline").addHandler(handler)
    for config in configs:
        results.append([])
        train_here(config, Wide, run)
    return results


@pytest.mark.soak
def test_what_was_not_sent_is_lost_on_another_number_of_ranks(tmp_path: Path) -> None:
    train_each_on(2, (config_of(compressed(), steps=5), Wide, tmp_path))
    # the first bucket has one matrix in both
    later = replace(compressed(columns=1), bucket_cap_mb=0.0005)
    configs = [
        config_of(compressed(), steps=6),
        config_of(compressed(columns=1), steps=7),
        config_of(later, steps=8),
    ]
    (ranks, columns, buckets), (others, *_), _ = run_ranks(3, resumed_messages, tmp_path, configs)
    assert ranks == ["PowerSGD's error feedback is that of 2 ranks: on 3 it begins anew"]
    assert others == []
    changed = (
        "of the gradients, or dist.powersgd_rank, changed since the checkpoint: PowerSGD "
        "starts anew from this bucket"
    )
    assert columns == [f"bucket 0 {changed} on, and what was not sent yet of these buckets is lost"]
    assert [message.partition(" on,")[0] for message in buckets] == [f"bucket 1 {changed}"]


def refusals(run: Path) -> list[str]:
    results = []
    with pytest.raises(UsageError) as caught:
        train_here(config_of(compressed(), steps=2), Scalar, run)
    results.append(str(caught.value))
    with RunManager(watch=NO_SIDECAR) as ddp:
        ddp.wrap(nn.Linear(3, 3), comm="fp16")
        with pytest.raises(UsageError) as caught:
            ddp.wrap(nn.Linear(3, 3), comm="powersgd")
    return [*results, str(caught.value)]


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    assert run_ranks(2, refusals, tmp_path)[0] == [
        "--dist.comm powersgd cannot send the gradient of scale: it has no rows\n"
        "  try: give the parameter the shape [1], or use --dist.comm bf16",
        "ddp.wrap(comm='powersgd') is not possible: it takes none, bf16 or fp16\n"
        "  try: for powersgd, whose state is saved with the run, use `drumline train --dist.comm powersgd`",
    ]


def test_a_state_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """Before the first step: not in the middle of a backward pass."""
    train_each_on(2, (config_of(compressed(), steps=5), Wide, tmp_path))
    saved = newest(tmp_path)
    for rank in saved.documents["comm"]["ranks"]:
        rank["dict"][0][1] = {"dict": [["columns", 2]]}
    tensors = {
        file: {name: tensor.clone() for name, tensor in group.items()}
        for file, group in saved.tensors.items()
    }
    store.write(tmp_path / "checkpoints", 5, tensors=tensors, documents=saved.documents, metrics={})
    with pytest.raises(RanksFailed) as caught:
        train_each_on(2, (config_of(compressed(), steps=6), Wide, tmp_path))
    assert (
        "the checkpoint's comm is not what Drumline saves: KeyError: 'parameters'"
        in caught.value.errors[0]
    )


def test_one_process_sends_nothing(tmp_path: Path) -> None:
    train_here(config_of(compressed(), steps=4), Wide, tmp_path)
    assert "comm" not in newest(tmp_path).documents
