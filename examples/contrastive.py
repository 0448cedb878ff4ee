"""A contrastive loss: each pair against all other pairs of the global batch. The same training on any number of ranks.

drumline train examples/contrastive.py:Pairs --procs 2
"""

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad
from torch.utils.data import TensorDataset

from drumline import Loss, Task

WIDTH, TEMPERATURE = 16, 0.1


class GatherRows(torch.autograd.Function):
    """Collective: the rows of all ranks, in the order of ranks; each gives the same number.

    A row is in the losses of all ranks, so the backward pass adds up its gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        gathered = rows.new_empty(dist.get_world_size() * len(rows), rows.shape[1])
        dist.all_gather(list(gathered.chunk(dist.get_world_size())), rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def pairs(count: int, seed: int) -> TensorDataset:
    """Two noisy views of the same hidden numbers."""
    views = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0)) / 3
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 8, generator=generator)
    return TensorDataset(*(hidden @ views + 0.1 * torch.randn(2, count, 32, generator=generator)).tanh())


class Pairs(Task):
    defaults: ClassVar[dict[str, Any]] = {
        "train.epochs": 8,
        "train.batch_size": 128,
        "train.eval_batch_size": 125,
        "optim.name": "adamw",
        "optim.lr": 0.005,
    }
    best_metric, higher_is_better = "accuracy", True

    def model(self) -> nn.Module:
        encoders = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, WIDTH)) for _ in range(2))
        return nn.ModuleList(encoders)

    def train_data(self) -> TensorDataset:
        # Whole batches only: each pair has as many negatives as any other, and every rank has pairs in each step.
        return pairs(2000 - 2000 % self.config.train.batch_size, seed=1)

    def eval_data(self) -> TensorDataset:
        return pairs(500, seed=2)

    def loss(self, model: nn.ModuleList, batch: tuple[Tensor, Tensor]) -> Loss:
        left, right = (normalize(encoder(view)) for encoder, view in zip(model, batch, strict=True))
        rows, first = torch.cat([left, right, torch.ones_like(left[:, :1])], 1), 0
        if self.training and dist.is_initialized():  # a batch of an evaluation is on one rank only
            most = -(-self.config.train.batch_size // dist.get_world_size())  # some ranks may have one pair fewer
            rows, first = GatherRows.apply(pad(rows, (0, 0, 0, most - len(rows)))), most * dist.get_rank()
        all_left, all_right, is_there = rows.split([WIDTH, WIDTH, 1], 1)
        own = torch.arange(first, first + len(left), device=left.device)
        scores = [one @ other.T / TEMPERATURE for one, other in ((left, all_right), (right, all_left))]
        scores = [one.masked_fill(is_there.T == 0, -math.inf) for one in scores]
        # The sum over this rank's pairs. Added up over ranks, as Drumline does, it is that of the global batch.
        total = (cross_entropy(scores[0], own, reduction="sum") + cross_entropy(scores[1], own, reduction="sum")) / 2
        return Loss(total, metrics={"accuracy": (scores[0].argmax(1) == own).sum()})
