"""`Task.on_device` prepares every batch that `loss` gets, and knows whether it is for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from drumline.tasks.base import Loss
from drumline.tasks.hook import Hook
from drumline.tasks.ready_hooks import LogSamples
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
    plain, prepared = (newest(tmp_path / task.__name__).tensors["model"] for task in (Plain, Prepared))
    assert all(torch.equal(tensor, prepared[name]) for name, tensor in plain.items())
    # In steps, evaluations and predictions, and in the checks before the first step.
    assert Prepared.modes == {(True, True), (False, False)}
