"""The contrastive loss of examples/contrastive.py, over the pairs of all ranks, has the same
gradient on any number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drumline.config.schema import Config, OptimConfig
from drumline.training.job.job import build_job, make_manager
from drumline.training.steps.eager import TrainStep
from drumline.training.tasks.base import Task
from drumline.training.tasks.built_in import load_task
from tests.jobs import make_config
from tests.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "contrastive.py"
# Four ranks have 3, 3, 2 and 2 of the ten pairs.
CONFIG = make_config(
    batch_size=10,
    optim=OptimConfig(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, schedule="constant"),
)


def in_double_precision(config: Config) -> Task:
    task = load_task(f"{EXAMPLE}:Pairs")(config)
    make = task.model
    prepare = task.on_device
    task.model = lambda: make().double()  # type: ignore[method-assign]
    task.on_device = lambda batch: [view.double() for view in prepare(batch)]  # type: ignore[method-assign]
    return task


def gradient_of_one_step() -> list[list[float]]:
    """What the first step takes away from each parameter: with a rate of 1 that is its gradient."""
    with make_manager(CONFIG) as ddp:
        job = build_job(CONFIG, in_double_precision(CONFIG), ddp)
        before = [parameter.detach().clone() for parameter in job.model.parameters()]
        TrainStep(job)(next(job.loader.steps()))
        gradients = [
            old - now.detach() for old, now in zip(before, job.model.parameters(), strict=True)
        ]
        job.close()
        return [gradient.flatten().tolist() for gradient in gradients]


def gradient_by_hand() -> list[list[float]]:
    """Of the mean over all pairs of the first global batch, with plain torch."""
    with make_manager(CONFIG) as ddp:
        job = build_job(CONFIG, in_double_precision(CONFIG), ddp)
        left, right = (
            nn.functional.normalize(encoder(view.double()))
            for encoder, view in zip(job.model.children(), job.loader.preview(), strict=True)
        )
        scores = left @ right.T / 0.1
        own = torch.arange(10)
        loss: Tensor = (
            nn.functional.cross_entropy(scores, own) + nn.functional.cross_entropy(scores.T, own)
        ) / 2
        gradients = torch.autograd.grad(loss, list(job.model.parameters()))
        job.close()
        return [gradient.flatten().tolist() for gradient in gradients]


@pytest.mark.soak
def test_gradients_over_all_ranks_pairs_are_those_of_one_process() -> None:
    [expected] = run_ranks(1, gradient_by_hand)
    assert max(abs(value) for one in expected for value in one) > 1e-3
    for world_size in (1, 2, 4):
        for results in run_ranks(world_size, gradient_of_one_step):
            for left, right in zip(results, expected, strict=True):
                assert left == pytest.approx(right, rel=1e-9, abs=1e-12)
