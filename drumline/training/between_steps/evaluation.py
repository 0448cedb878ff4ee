"""Evaluation: the mean loss and the metrics of the model as it is now, the same numbers on any
number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drumline.base.errors import TrainingError
from drumline.data.evaluation_loader import EvaluationLoader
from drumline.parallel.wrap import LiveBuffers
from drumline.rank.collectives import all_sum, broadcast_json
from drumline.training.job.evaluation_job import EvaluationJob
from drumline.training.job.task_metrics import compute_metrics, update_metrics
from drumline.training.tasks.base import evaluation_mode
from drumline.watch.heartbeat import Phase


@torch.no_grad()
def evaluate(job: EvaluationJob) -> dict[str, Any]:
    """Collective: the mean loss and all metrics of the model, as it is now, over every sample of
    each evaluation set. Those of a set with a name are called `NAME/METRIC`."""
    job.heartbeat.mark(Phase.EVALUATION)
    LiveBuffers(job.model).broadcast()
    metrics: dict[str, Any] = {}
    with evaluation_mode(job.task, job.model):
        for name, loader in job.eval_loaders.items():
            prefix = f"{name}/" if name else ""
            metrics |= {
                f"{prefix}{metric}": value for metric, value in _evaluate_set(job, loader).items()
            }
    return metrics


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that are one number each, and not a matrix or a curve."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _evaluate_set(job: EvaluationJob, loader: EvaluationLoader) -> dict[str, Any]:
    """Collective. A batch holds the same samples whatever the world size, every batch is summed by
    one rank, and the sums are added with exact rounding, in any order."""
    device = job.ddp.device
    for metric in job.metrics.values():
        metric.reset()
    names, sums = _sum_batches(job, loader)
    # Rank 0 always has the first batch; a rank without a batch gets the names from it.
    batches_here = [loader.num_batches, loader.digest]
    names, expected = broadcast_json([names, batches_here])
    # They differ only for a stream: other datasets were compared before the first step.
    if batches_here != expected:
        what = "an evaluation stream whose first sample differs from that of rank 0"
        if batches_here[0] != expected[0]:
            what = f"{batches_here[0]} evaluation batches from its stream, rank 0 {expected[0]}"
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
    reported = job.reported(
        {name: total / weight for name, total in zip(names, totals, strict=True)}
    )
    measured = compute_metrics(job.metrics, job.ddp, is_updated=bool(sums))
    if repeated := sorted(reported.keys() & measured.keys()):
        raise TrainingError(
            f"loss() or report() and metrics() both report {', '.join(repeated)}",
            next_step="rename one of them",
        )
    return {**reported, **measured}


def _sum_batches(
    job: EvaluationJob, loader: EvaluationLoader
) -> tuple[list[str], dict[int, Tensor]]:
    """The names of the metrics, and for each batch number a row: weight, loss, metrics."""
    names: list[str] = []
    sums = {}
    for number, size, data in loader.numbered(padded=job.is_sharded):
        job.heartbeat.mark(Phase.EVALUATION)  # so that a long evaluation shows progress
        with job.autocast:
            loss = job.task.loss(job.model, job.task.on_device(data))
        if size == 0:  # only to gather the parameters with the other ranks
            continue
        update_metrics(job.metrics, loss.outputs)
        names = ["loss", *loss.metrics]
        row = [size if loss.weight is None else loss.weight, loss.total, *loss.metrics.values()]
        sums[number] = torch.stack(
            [torch.as_tensor(value, device=job.ddp.device).double() for value in row]
        )
    return names, sums
