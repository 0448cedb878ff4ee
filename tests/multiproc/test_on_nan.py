"""`--train.on_nan`: a loss or gradient that is not finite is found, named, and costs no finite
checkpoint."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from drumline.base.errors import TrainingError
from drumline.checkpoint import store
from drumline.config.schema import CheckpointConfig, Config, DistConfig, LogConfig, OptimConfig
from drumline.data.sharding import permute
from drumline.report.verify.run_check import verify_run
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training.between_steps.preemption import Preemption
from drumline.training.tasks.base import Loss
from tests.jobs import (
    NUM_SAMPLES,
    Classify,
    Normalised,
    Points,
    assert_same_bits,
    make_config,
    newest,
    train_here,
    train_on,
)
from tests.ranks import RanksFailed

BATCH = 8
MARK = 1234.5
MARKED = 20


class Fragile(nn.Module):
    """Its output is NaN for one sample."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.where(inputs == MARK, math.nan, inputs)


class Breaks(Normalised):
    """One sample of every epoch makes a module's output NaN, and with it BatchNorm's statistics."""

    def model(self) -> nn.Module:
        return nn.Sequential(Fragile(), *super().model().double())

    def train_data(self) -> Dataset[Any]:
        points = Points(self.config.data.samples)
        points.inputs[MARKED, 3] = MARK
        return points


def step_of_the_marked() -> int:
    indices = permute(np.arange(NUM_SAMPLES), length=NUM_SAMPLES, seed=0, epoch=0).tolist()
    return int(indices.index(MARKED)) // BATCH + 1


def rank_of_the_marked() -> int:
    indices = permute(np.arange(NUM_SAMPLES), length=NUM_SAMPLES, seed=0, epoch=0).tolist()
    return int(indices.index(MARKED)) % BATCH // (BATCH // 2)


def config_of(on_nan: str, *, log_every: int = 1, **settings: Any) -> Config:
    checkpoint = CheckpointConfig(every_steps=1, keep_last=1, keep_best=0)
    config = make_config(batch_size=BATCH, checkpoint=checkpoint, on_nan=on_nan, **settings)
    return replace(config, log=LogConfig(every_steps=log_every, display="none"))


def messages(run: Path, kind: str = "warning") -> list[str]:
    return [
        e["message"] for e in read_events(run / "events" / "rank-00000.jsonl") if e["kind"] == kind
    ]


def is_finite(snapshot: store.Snapshot) -> bool:
    return all(
        bool(torch.isfinite(tensor).all())
        for file in ("model", "optimizer")
        for tensor in snapshot.tensors[file].values()
    )


def test_a_nan_stops_the_run_before_the_next_save_and_names_step_rank_and_module(
    tmp_path: Path,
) -> None:
    bad = step_of_the_marked()
    config = config_of("stop", log_every=100)
    with pytest.raises(RanksFailed) as failed:
        train_on(2, config, Breaks, tmp_path)
    sentence = "the loss is not finite: 0 (Fragile) is the first module with a non-finite output"
    assert sentence in str(failed.value)
    assert f"[rank {rank_of_the_marked()} on " in str(failed.value)
    assert f", step {bad}]" in str(failed.value)
    assert "rerun the same command to resume from the newest finite checkpoint; " in str(
        failed.value
    )
    assert catalog.list_steps(tmp_path / "checkpoints") == [bad - 1]
    assert is_finite(newest(tmp_path))
    # Resumed with `skip` it trains to its end.
    train_here(config_of("skip"), Breaks, tmp_path)
    assert is_finite(newest(tmp_path))


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"exact": "elastic", "shards": 4}])
def test_it_is_found_with_the_log_line_in_every_kind_of_step(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = replace(config_of("stop", log_every=3, **settings), checkpoint=CheckpointConfig())
    with pytest.raises(RanksFailed) as failed:
        train_on(1, config, Breaks, tmp_path)
    assert "0 (Fragile) is the first module" in str(failed.value)
    assert f", step {step_of_the_marked()}]" in str(failed.value)
    assert "rerun the same command; --train.on_nan skip leaves such updates out" in str(
        failed.value
    )


@pytest.mark.parametrize("settings", [{}, {"exact": "elastic", "shards": 4}])
def test_skip_leaves_the_update_out_on_all_ranks(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = config_of("skip", **settings)
    train_on(2, config, Breaks, tmp_path)
    assert is_finite(newest(tmp_path))
    trained = [
        e for e in read_events(tmp_path / "events" / "rank-00000.jsonl") if e["kind"] == "train"
    ]
    lost = [event["step"] for event in trained if not math.isfinite(event["loss"])]
    assert lost[0] == step_of_the_marked()
    first, second = (message for message in messages(tmp_path) if "skipped" in message)
    assert (
        f"were skipped: 1, the first at step {lost[0]} (1 since the start): 0 (Fragile) is the first"
        in first
    )
    assert f"[rank {rank_of_the_marked()} on " in first
    # The batch of the second one was not run again, so nothing is said of its cause.
    assert f"the first at step {lost[1]} (2 since the start) [rank " in second
    assert not verify_run(tmp_path, print).problems


def test_a_run_without_a_nan_has_the_same_bits_whatever_is_set(tmp_path: Path) -> None:
    for on_nan in ("stop", "skip", "warn"):
        train_here(config_of(on_nan), Normalised, tmp_path / on_nan)
    snapshots = [newest(tmp_path / on_nan) for on_nan in ("stop", "skip", "warn")]
    for other in snapshots[1:]:
        for snapshot in (snapshots[0], other):
            snapshot.documents["progress"]["facts"]["config"]["train.on_nan"] = None
        assert_same_bits(snapshots[0], other)


def test_warn_continues_but_keeps_the_finite_checkpoint_and_resumes_from_it(tmp_path: Path) -> None:
    bad = step_of_the_marked()
    train_here(config_of("warn"), Breaks, tmp_path)
    place = f"[rank 0 on {socket.gethostname()}, step {bad}]"
    assert f"the loss is not finite since step {bad} {place}" in messages(tmp_path)
    marked = [message for message in messages(tmp_path) if "the checkpoint is marked" in message]
    assert marked == [f"model/1.weight is not finite; the checkpoint is marked {place}"]
    last = catalog.list_steps(tmp_path / "checkpoints")[-1]
    assert catalog.list_steps(tmp_path / "checkpoints") == [bad - 1, last]
    assert (
        catalog.check_sizes(tmp_path / "checkpoints" / catalog.folder_name(last)).non_finite
        == "model/1.weight"
    )
    found = verify_run(tmp_path, print)
    assert [str(problem) for problem in found.problems] == [
        f"checkpoints/step-{last:08d}: model/1.weight is not finite (NaN or infinity)"
    ]
    assert found.last_valid_step == bad - 1
    with pytest.raises(TrainingError):
        train_here(config_of("stop"), Breaks, tmp_path)
    skipped = tmp_path / "checkpoints" / catalog.folder_name(last)
    assert f"the checkpoint {skipped} was skipped: model/1.weight is not finite" in messages(
        tmp_path
    )
    resumed = [
        e for e in read_events(tmp_path / "events" / "rank-00000.jsonl") if e["kind"] == "resume"
    ]
    assert resumed[0]["step"] == bad - 1


class BadGradient(Classify):
    """The loss stays finite; the gradient of a root at 0 does not."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total + (model[0].weight * 0.0).sqrt().sum(), metrics=loss.metrics)  # type: ignore[index, operator]


def test_weights_that_a_gradient_made_nan_are_not_saved(tmp_path: Path) -> None:
    config = replace(config_of("stop", log_every=100), optim=OptimConfig(lr=0.1))
    with pytest.raises(TrainingError, match=r"^model/0\.weight is not finite") as caught:
        train_here(config, BadGradient, tmp_path)
    assert caught.value.place.step == 1
    assert catalog.list_steps(tmp_path / "checkpoints") == []


def test_where_the_weights_were_nan_before_the_parameter_is_named(tmp_path: Path) -> None:
    config = replace(config_of("stop", log_every=3), checkpoint=CheckpointConfig(every_epochs=0))
    with pytest.raises(
        TrainingError, match=r"the parameter 0\.weight was not finite before it"
    ) as caught:
        train_here(config, BadGradient, tmp_path)
    assert caught.value.place.step == 2


class Overflows(Classify):
    """So steep that the first loss scales of fp16 are too large: normal there, and no NaN."""

    def model(self) -> nn.Module:
        return super().model().float()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, (batch[0].float(), batch[1]))
        return Loss(loss.total * 1e35, metrics=loss.metrics)


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_what_the_loss_scaler_leaves_out_is_no_nan(tmp_path: Path, on_nan: str) -> None:
    # `deterministic` fills memory that is not set with NaN: SGD's momentum, where its first update
    # is left out.
    settings = {"precision": "fp16", "deterministic": True, "epochs": 6}
    config = replace(config_of(on_nan, **settings), optim=OptimConfig(lr=1e-36, clip_norm=None))
    train_on(1, config, Overflows, tmp_path)
    assert newest(tmp_path).documents["scaler"]["scale"] < 2.0**16
    assert is_finite(newest(tmp_path))
    assert not any("not finite" in message for message in messages(tmp_path))


class BreaksInHalf(Breaks):
    """In single precision, for fp16; the sample is one of rank 1."""

    def model(self) -> nn.Module:
        return super().model().float()

    def train_data(self) -> Dataset[Any]:
        points = Points(self.config.data.samples)
        indices = permute(np.arange(NUM_SAMPLES), length=NUM_SAMPLES, seed=0, epoch=0).tolist()
        points.inputs[indices[BATCH + BATCH - 1], 3] = MARK
        return points

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        return super().loss(model, (batch[0].float(), batch[1]))


def test_with_fp16_a_step_counts_that_only_another_rank_saw(tmp_path: Path) -> None:
    train_on(2, config_of("skip", precision="fp16", steps=4), BreaksInHalf, tmp_path)
    [message] = [message for message in messages(tmp_path) if "skipped" in message]
    assert (
        "were skipped: 1, the first at step 2 (1 since the start): 0 (Fragile) is the first"
        in message
    )
    assert "[rank 1 on " in message
    assert is_finite(newest(tmp_path))


class FailsWithNan(Breaks):
    """What it does with a NaN, and without a graph, fails: not a word of that may hide the NaN."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        loss = super().loss(model, batch)
        if model.training:
            torch.autograd.grad(loss.total, [model[1].weight], retain_graph=True)  # type: ignore[index, union-attr, list-item]
        return loss

    def report(self, means: dict[str, float]) -> dict[str, float]:
        return {**means, "percent": int(means["loss"] * 100)}


def test_an_error_of_the_task_does_not_take_the_place_of_the_nan(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"^the loss is not finite: 0 \(Fragile\) is the first"):
        train_here(config_of("stop"), FailsWithNan, tmp_path)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        points = Points()
        points.inputs[BATCH * 2, 3] = MARK
        return (points[index % len(points)] for index in range(10**6))


class BreaksInAStream(Breaks):
    def train_data(self) -> Any:
        return Endless()

    def eval_data(self) -> None:
        return None


def test_of_a_stream_no_batch_is_called_finite(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        train_here(config_of("stop", steps=4, epochs=None), BreaksInAStream, tmp_path)
    assert caught.value.what == "the loss is not finite"
    assert caught.value.place.step == 3


class OwnBuffer(Normalised):
    """Rank 1 has a NaN in a buffer of its own, which no checkpoint holds."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if model.training and torch.distributed.get_rank() == 1:
            model[1].running_mean.fill_(math.nan)  # type: ignore[index, union-attr, operator]
        return super().loss(model, batch)


def test_only_what_is_saved_is_checked(tmp_path: Path) -> None:
    config = replace(config_of("stop", steps=2), dist=DistConfig(broadcast_buffers=False))
    train_on(2, config, OwnBuffer, tmp_path)
    assert is_finite(newest(tmp_path))


def test_what_was_skipped_since_the_last_log_line_is_reported_on_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = step_of_the_marked()
    cause = {"signal": "SIGTERM", "rank": 0, "host": "here"}
    monkeypatch.setattr(Preemption, "is_asked", True)
    monkeypatch.setattr(Preemption, "cause", cause)
    monkeypatch.setattr(Preemption, "stops_at", lambda self, step: step == bad)
    config = replace(config_of("skip", log_every=100), checkpoint=CheckpointConfig(every_epochs=0))
    assert train_here(config, Breaks, tmp_path).step == bad
    assert f"were skipped: 1, the first at step {bad} (1 since the start)" in messages(tmp_path)[-1]
