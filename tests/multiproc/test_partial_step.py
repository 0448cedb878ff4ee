"""A step that fails half way through its backward pass can be taken again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from drumline.training.job.job import build_job, make_manager
from drumline.training.steps.eager import TrainStep
from drumline.training.steps.graph import undo_partial_step
from drumline.training.tasks.base import Loss
from tests.jobs import Classify, make_config
from tests.ranks import run_ranks


class Fails(torch.autograd.Function):
    """Fails in its backward pass, as long as it is switched on."""

    is_on = False

    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        if Fails.is_on:
            raise RuntimeError("as if it could not be captured")
        return gradient


class HalfWay(Classify):
    def model(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 2)]).double()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        first, second = model.children()
        scores = second(Fails.apply(first(batch[0])))
        return Loss(nn.functional.cross_entropy(scores, batch[1], reduction="sum"))


def weights_after_some_steps(fails_at: int | None) -> list[float]:
    config = make_config()
    with make_manager(config) as ddp:
        job = build_job(config, HalfWay(config), ddp)
        train_step = TrainStep(job)
        for number, step in enumerate(job.loader.steps()):
            micro_batches = list(step.micro_batches)
            if number == fails_at:
                Fails.is_on = True
                with pytest.raises(RuntimeError, match="as if"):
                    train_step(step._replace(micro_batches=iter(micro_batches)))
                Fails.is_on = False
                undo_partial_step(job.applied, job.optimizer, job.scaler)
            train_step(step._replace(micro_batches=iter(micro_batches)))
            if number == 3:
                break
        return [float(parameter.detach().sum()) for parameter in job.model.parameters()]


def test_it_is_as_if_it_had_not_begun() -> None:
    assert run_ranks(2, weights_after_some_steps, 2) == run_ranks(2, weights_after_some_steps, None)
