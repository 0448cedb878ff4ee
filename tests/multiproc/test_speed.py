"""What the events of a run have about its speed, on real ranks."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.config.schema import CheckpointConfig
from drumline.runs.events import read_events
from drumline.training.tasks.base import Loss
from drumline.training.tasks.hook import Hook, Run
from tests.jobs import Classify, WeighTokens, make_config, train_each_on, train_here

SLEEP_S = 0.08
SLOW_START_S = 3.0


class SlowRank(Classify):
    """Rank 1 takes longer for every micro-batch, so rank 0 waits in the all-reduce."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if self.training and dist.get_rank() == 1:
            time.sleep(SLEEP_S)
        return super().loss(model, batch)


class Named(WeighTokens):
    """Batches as Hugging Face has them, cut to the longest sequence in them."""

    @staticmethod
    def collate(samples: Any) -> dict[str, Tensor]:  # type: ignore[override]
        inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
        longest = int((targets >= 0).sum(1).max())
        return {"input_ids": inputs[:, :longest], "labels": targets[:, :longest]}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch["input_ids"], batch["labels"]))


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event for event in read_events(run / "events" / "rank-00000.jsonl") if event["kind"] == kind
    ]


def test_exposed_communication_is_the_mean_of_all_ranks(tmp_path: Path) -> None:
    """Also where only the last micro-batch is synchronized. Elastic steps do not use DDP."""
    config = make_config(steps=14, batch_size=8, accumulate=2)
    elastic = make_config(steps=6, batch_size=8, exact="elastic", shards=2)
    train_each_on(
        2, (config, SlowRank, tmp_path / "slow"), (elastic, Classify, tmp_path / "elastic")
    )
    trained = events(tmp_path / "slow", "train")
    [end] = events(tmp_path / "slow", "end")
    for event in [*trained, end]:
        assert event["data_share"] + (event["communication_share"] or 0.0) <= 1.0
    shares = [event["communication_share"] for event in trained]
    # Rank 0 waits nearly all the time, rank 1 never: on a loaded machine both take longer to
    # compute.
    assert 0.05 < shares[-1] < 0.65
    assert 0.05 < end["communication_share"] < 0.65
    assert {event["communication_share"] for event in events(tmp_path / "elastic", "train")} == {
        None
    }


class BeginsLoop(Hook):
    def __init__(self, task: SlowStart) -> None:
        self._task = task

    def start(self, run: Run) -> None:
        self._task.is_first_step = True


class SlowStart(Classify):
    """Its first step takes long, as if torch compiled."""

    is_first_step = False

    def hooks(self) -> list[Hook]:
        return [BeginsLoop(self)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if self.is_first_step:
            time.sleep(SLOW_START_S)
            self.is_first_step = False
        return super().loss(model, batch)


def test_the_summary_has_the_speed_after_the_start(tmp_path: Path) -> None:
    train_here(make_config(steps=12, batch_size=8, samples=96), SlowStart, tmp_path)
    [end] = events(tmp_path, "end")
    assert end["start_s"] >= SLOW_START_S
    assert end["samples_per_s"] >= 11 * 8 / (end["seconds"] - end["start_s"])


def test_tokens_flops_and_pauses_are_in_the_events(tmp_path: Path) -> None:
    """Sequences of different lengths: each batch has its own number of tokens."""
    every = CheckpointConfig(every_steps=2)
    train_here(make_config(steps=4, batch_size=3, checkpoint=every), Named, tmp_path)
    trained = events(tmp_path, "train")
    [end] = events(tmp_path, "end")
    per_sample = {round(event["tokens_per_s"] / event["samples_per_s"], 6) for event in trained}
    assert len(per_sample) == 2, "as many as there are log intervals"
    # A token: 5 x 11 weights, forward and two gradients, less the one that the embedding has no
    # inputs for.
    for event in [*trained, end]:
        assert event["tflop_per_s"] / event["tokens_per_s"] == pytest.approx(3 * 2 * 5 * 11 / 1e12)
        assert (event["mfu"], event["communication_share"]) == (None, None)
    paused = [event["blocked_s"] for event in events(tmp_path, "checkpoint")]
    assert len(paused) == 2
    assert math.isclose(end["checkpoint_pause_s"], sum(paused))


class RefusesTwo(Classify):
    """Its loss does not take two samples."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        if len(batch[0]) == 2:
            raise ValueError("two are too few")
        return super().loss(model, batch)


def test_a_loss_that_fails_for_two_samples_is_not_counted(tmp_path: Path) -> None:
    train_here(make_config(steps=2, samples=16), RefusesTwo, tmp_path)
    [end] = events(tmp_path, "end")
    assert (end["tflop_per_s"], end["tokens_per_s"]) == (None, None)
    assert end["samples_per_s"] > 0
