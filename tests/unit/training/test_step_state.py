"""A step that failed has changed nothing that the next one depends on."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from drumline.metrics.meters import Meter
from drumline.training.replica_state import StepState

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Its forward pass changes what it saves beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, inputs: Tensor) -> Tensor:
        self.count.add_(1)
        return inputs

    def get_extra_state(self) -> Tensor:
        return self.count

    def set_extra_state(self, state: Tensor) -> None:
        self.count.copy_(state)


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Counting())


def forward(model: nn.Module, meter: Meter) -> list[float]:
    """One forward pass as a task writes it; returns the random numbers that were drawn next."""
    inputs = torch.randn(6, 3) + np.random.rand() + random.random()
    total = model(inputs).sum()
    meter.add(total, 6, {"accuracy": torch.ones(())})
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_all_that_a_forward_pass_writes_is_restored() -> None:
    model = make_model()
    meter = Meter(CPU)
    forward(model, meter)
    state = StepState(model, meter, CPU)
    for _ in range(2):  # the second time in the memory of the first
        state.keep()
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        sums = meter.peek()
        drawn = forward(model, meter)
        assert not torch.equal(model[1].running_mean, saved["1.running_mean"])
        state.restore()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved[name]), name
        assert torch.equal(meter.peek(), sums)
        assert forward(model, meter) == drawn


def test_the_first_step_of_all_is_undone_too() -> None:
    """The names of the metrics are not known before it."""
    model = make_model()
    meter = Meter(CPU)
    state = StepState(model, meter, CPU)
    state.keep()
    forward(model, meter)
    state.restore()
    assert meter.peek().tolist() == [0.0, 0.0, 0.0]
    assert model[3].count == 0
