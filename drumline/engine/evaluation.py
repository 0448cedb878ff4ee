"""Evaluation: the mean loss and metrics of the model as it is now, the same numbers on any number of ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from drumline.data.evaluation_loader import EvaluationLoader
from drumline.distributed.collectives import all_sum, broadcast_json
from drumline.distributed.wrap import LiveBuffers
from drumline.engine.job import Job
from drumline.errors import TrainingError
from drumline.watch.heartbeat import Phase


@torch.no_grad()
def evaluate(job: Job, loader: EvaluationLoader) -> dict[str, float]:
    """Collective: the mean loss and metrics of the model, as it is now, over every sample of `loader`.

    The same numbers on any number of ranks: a batch holds the same samples whatever the world size, every batch is
    summed by one rank, and the sums are added with exact rounding, in whatever order."""
    model, device = job.model, job.ddp.device
    job.heartbeat.mark(Phase.EVALUATION)
    LiveBuffers(model).broadcast()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    names, sums = _sum_batches(job, loader)
    for module, was_training in modes:  # a user may have put parts of the model into eval mode for good
        module.training = was_training
    # Rank 0 always has the first batch; a rank that has none learns the names from it.
    mine = [loader.num_batches, loader.digest]
    names, expected = broadcast_json([names, mine], device=device)
    if mine != expected:  # only a stream's: of anything else the ranks have compared samples before the first step
        what = "an evaluation stream whose first sample differs from that of rank 0"
        if mine[0] != expected[0]:
            what = f"{mine[0]} evaluation batches from its stream, rank 0 {expected[0]}"
        raise TrainingError(
            f"rank {job.ddp.rank} read {what}",
            next_step="let every rank read the whole evaluation stream in one order: Drumline splits it by batches",
        )
    table = torch.zeros(expected[0], 1 + len(names), dtype=torch.float64, device=device)
    for number, row in sums.items():
        table[number] = row
    weight, *totals = (math.fsum(column) for column in all_sum(table).cpu().T.tolist())
    if weight <= 0:
        raise TrainingError("the weights of the evaluation set add up to 0, so it has no mean loss")
    return job.reported({name: total / weight for name, total in zip(names, totals, strict=True)})


def _sum_batches(job: Job, loader: EvaluationLoader) -> tuple[list[str], dict[int, Tensor]]:
    """The names of what is measured, and by batch number a row: weight, loss, metrics."""
    names: list[str] = []
    sums = {}
    for number, size, data in loader.numbered():
        job.heartbeat.mark(Phase.EVALUATION)  # so that a long evaluation shows progress
        with job.autocast:
            loss = job.task.loss(job.model, data)
        names = ["loss", *loss.metrics]
        row = [size if loss.weight is None else loss.weight, loss.total, *loss.metrics.values()]
        sums[number] = torch.stack([torch.as_tensor(value, device=job.ddp.device).double() for value in row])
    return names, sums
