"""`--train.deterministic`, and what the bits of a run depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drumline.base.errors import TrainingError
from drumline.config.schema import Config
from drumline.runs.events import read_events
from drumline.training.job.job import Progress
from drumline.training.manager import RunManager
from drumline.training.run import TrainingRun
from drumline.training.run_context import RunRequest
from drumline.training.tasks.base import Loss
from tests.jobs import Classify, make_config, train_here
from tests.ranks import RanksFailed, run_ranks


class Scattering(Classify):
    """Uses an operation of which torch has no version that gives the same bits each time."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
        return super().loss(model, batch)


def train_deterministically(config: Config, run: Path) -> dict[str, Any]:
    ddp = RunManager(deterministic=True, threads=1)
    ddp.setup()
    try:
        TrainingRun(
            RunRequest("test", config, run, False, ("test",)), Scattering, ddp, Progress()
        ).train()
    finally:
        ddp.cleanup()
    raise AssertionError("torch was to refuse this")


def settings_of_torch() -> tuple[bool, bool, int]:
    with RunManager(deterministic=True, threads=1):
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.get_num_threads(),
        )


def test_only_kernels_with_the_same_bits_are_allowed() -> None:
    assert run_ranks(1, settings_of_torch) == [(True, False, 1)]


def test_an_operation_that_is_refused_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(1, train_deterministically, make_config(), tmp_path)
    text = caught.value.errors[0]
    assert TrainingError.__name__ in text
    assert "put_ does not have a deterministic implementation on this device" in text
    assert "use another operation, or leave --train.deterministic" in text


def test_a_resume_with_other_threads_says_that_bits_may_differ(tmp_path: Path) -> None:
    config = make_config(epochs=1)
    run_ranks(1, train_with_threads, 1, config, tmp_path)
    run_ranks(
        1, train_with_threads, 2, replace(config, train=replace(config.train, epochs=2)), tmp_path
    )
    events = read_events(tmp_path / "events" / "rank-00000.jsonl")
    assert [event["message"] for event in events if event["kind"] == "warning"] == [
        "train.epochs changed since the checkpoint: 1 -> 2",
        "the number of threads changed since the checkpoint: 1 -> 2; bits may differ from here on",
    ]


def train_with_threads(threads: int, config: Config, run: Path) -> None:
    torch.set_num_threads(threads)
    train_here(config, Classify, run)
