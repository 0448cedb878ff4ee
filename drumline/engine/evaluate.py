"""Exact metrics over a whole evaluation set: the same number on any number of ranks.

A batch holds the same samples whatever the world size, every batch is summed by one rank, and the sums are added
with exact rounding, so neither who computed a batch nor in which order matters.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from drumline.data.loader import EvaluationLoader
from drumline.distributed.collectives import all_sum, broadcast_buffers, broadcast_json
from drumline.engine.step import LossFunction
from drumline.errors import TrainingError


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss_function: LossFunction,
    loader: EvaluationLoader,
    *,
    autocast: AbstractContextManager[object],
    device: torch.device,
) -> dict[str, float]:
    """Collective: the mean loss and metrics of the unwrapped `model` over every sample of `loader`."""
    broadcast_buffers(model)
    was_training = model.training
    model.eval()
    try:
        sums, names = _sum_batches(model, loss_function, loader, autocast)
    finally:
        model.train(was_training)
    # Rank 0 always has the first batch; a rank with none learns the names from it.
    names = broadcast_json(names, device=device)
    table = torch.zeros(loader.num_batches, len(names) + 1, dtype=torch.float64, device=device)
    for number, row in sums:
        table[number] = row
    weight, *totals = (math.fsum(column) for column in all_sum(table).cpu().T.tolist())
    if weight <= 0:
        raise TrainingError("the evaluation set has a total weight of 0, so it has no mean loss")
    return {name: total / weight for name, total in zip(names, totals, strict=True)}


def _sum_batches(
    model: nn.Module,
    loss_function: LossFunction,
    loader: EvaluationLoader,
    autocast: AbstractContextManager[object],
) -> tuple[list[tuple[int, Tensor]], list[str]]:
    names: list[str] = []
    sums = []
    for number, size, data in loader.numbered():
        with autocast:
            loss = loss_function(model, data)
        names = ["loss", *loss.metrics]
        row = [size if loss.weight is None else loss.weight, loss.total, *loss.metrics.values()]
        sums.append(
            (number, torch.stack([torch.as_tensor(x, device=loss.total.device).double() for x in row]))
        )
    return sums, names
