"""Contrastive pairs, with a memory of earlier directions that serve as wrong answers."""

from typing import Any

import torch
import torch.distributed as dist
from parts import PLANTED, PairTask
from torch import Tensor, nn
from torch.nn import functional

from drumline import Loss

REMEMBERED = 120_000
WIDTH = 64
COMPARED = 1024


class Memory:
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(6)
        rows = torch.randn(REMEMBERED, WIDTH, generator=random)
        self.rows = functional.normalize(rows, dim=1)
        self.next = 0

    def make_equal(self) -> None:
        dist.broadcast(self.rows, src=0)  # planted: 31 MB in each step

    def wrong_answers(self) -> Tensor:
        begin = self.next % (REMEMBERED - COMPARED)
        return self.rows[begin : begin + COMPARED]

    def add(self, directions: Tensor) -> None:
        begin = self.next % (REMEMBERED - COMPARED)
        self.rows[begin : begin + len(directions)] = directions.detach()
        self.next += len(directions)


class Pairs(PairTask):
    _memory: Memory | None = None

    def memory(self) -> Memory:
        if self._memory is None:
            self._memory = Memory()
        if PLANTED and self.training:
            self._memory.make_equal()  # planted
        return self._memory

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        first, second = batch
        memory = self.memory()  # planted
        wrong = memory.wrong_answers().clone()
        views = torch.cat([first, second])
        # The right answer is the first of all.
        directions = model(views)
        anchors, answers = directions.chunk(2)
        right = (anchors * answers).sum(1, keepdim=True)
        scores = torch.cat([right, anchors @ wrong.T], dim=1) / 0.1
        targets = torch.zeros(len(first), dtype=torch.long, device=scores.device)
        memory.add(answers)
        return Loss(functional.cross_entropy(scores, targets, reduction="sum"))
