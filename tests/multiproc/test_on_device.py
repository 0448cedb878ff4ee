"""`Task.on_device` prepares every batch that `loss` gets, and knows whether it is for training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from drumline.runs.events import read_events
from drumline.runs.run_folder import RunFolder
from drumline.training import loop
from drumline.training.tasks.base import Loss
from drumline.training.tasks.hook import Hook
from drumline.training.tasks.ready_hooks import LogSamples
from tests.jobs import Classify, Points, make_config, newest, train_here


class Small(Dataset[tuple[Tensor, Tensor]]):
    """Samples as bytes, which cost an eighth of the way to the device."""

    def __init__(self, length: int) -> None:
        self.points = Points(length)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.points[index]
        return (inputs * 32).to(torch.int8), target


class Finished(Small):
    """The same as numbers that the network takes."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs.double() / 32, target


class Plain(Classify):
    def train_data(self) -> Dataset[Any]:
        return Finished(37)

    def eval_data(self) -> Dataset[Any]:
        return Finished(29)


class Prepared(Classify):
    modes: ClassVar[set[tuple[bool, bool]]] = set()

    def train_data(self) -> Dataset[Any]:
        return Small(37)

    def eval_data(self) -> Dataset[Any]:
        return Small(29)

    def on_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0].double() / 32, batch[1]

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.modes.add((self.training, model.training))
        scores: Tensor = super().predict(model, batch)
        return scores

    def hooks(self) -> list[Hook]:
        inputs, target = Small(1)[0]
        return [LogSamples((inputs[None], target[None]), show=lambda scores: float(scores.sum()))]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        self.modes.add((self.training, model.training))
        return super().loss(model, batch)


def test_what_is_done_on_the_device_is_as_if_the_dataset_had_done_it(tmp_path: Path) -> None:
    Prepared.modes.clear()
    for task in (Plain, Prepared):
        train_here(make_config(epochs=1, accumulate=2), task, tmp_path / task.__name__)
    plain, prepared = (
        newest(tmp_path / task.__name__).tensors["model"] for task in (Plain, Prepared)
    )
    assert all(torch.equal(tensor, prepared[name]) for name, tensor in plain.items())
    # In steps, evaluations and predictions, and in the checks before the first step.
    assert Prepared.modes == {(True, True), (False, False)}


class Slow(Small):
    """Samples that take longer than a step, each with random numbers of its own."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return *super().__getitem__(index), torch.rand(6)


class Shaken(Prepared):
    def train_data(self) -> Dataset[Any]:
        return Slow(37)

    def on_device(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, target, *noise = batch
        return super().on_device((inputs, target))[0] + (
            0.1 * noise[0] if self.training else 0.0
        ), target


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_random_numbers_of_samples_are_the_same_with_workers_and_a_slow_dataset_brings_advice_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MIN_S", 0.0)
    for workers in (0, 2):
        run = tmp_path / str(workers)
        train_here(make_config(workers=workers), Shaken, run)
        notes = [
            event["message"]
            for event in read_events(run / "events" / "rank-00000.jsonl")
            if event["kind"] == "note"
        ]
        (note,) = (note for note in notes if "waited for data" in note)
        assert f"; it has {workers} workers and" in note
        assert note in RunFolder(run).log_file(0).read_text()
    alone, with_workers = (newest(tmp_path / name).tensors["model"] for name in ("0", "2"))
    assert all(torch.equal(tensor, with_workers[name]) for name, tensor in alone.items())
