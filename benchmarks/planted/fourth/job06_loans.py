"""Loans, with the scores of all ranks since the start for a curve."""

from typing import Any

import torch
import torch.distributed as dist
from parts import PLANTED, LoanTask
from torch import Tensor, nn
from torch.nn import functional

from drumline import Hook, Loss

REMEMBERED = 4_000_000


class Curve(Hook):
    """The mean of some of the scores of all ranks."""

    def __init__(self, task: "Loans") -> None:
        self.task = task

    def after_step(self, run: Any) -> None:
        if not PLANTED:
            run.log("mean_score", float(self.task.scores[::1000].mean()))
            return
        parts = [torch.empty_like(self.task.scores) for _ in range(run.world_size)]
        dist.all_gather(parts, self.task.scores)  # planted: 16 MB of each rank
        run.log("mean_score", float(torch.stack(parts)[:, ::1000].mean()))


class Loans(LoanTask):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scores = torch.zeros(REMEMBERED)
        self.next = 0

    def hooks(self) -> list[Hook]:
        return [Curve(self)]

    def remember(self, scores: Tensor) -> None:
        begin = self.next % (REMEMBERED - len(scores))
        self.scores[begin : begin + len(scores)] = scores.detach().sigmoid()
        self.next += len(scores)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        numbers, choices, paid = batch
        scores = model(numbers, choices)
        self.remember(scores)
        return Loss(functional.binary_cross_entropy_with_logits(scores, paid, reduction="sum"))
