"""Loans, with groups of customers that are found anew every few steps."""

from typing import Any

import torch
from parts import PLANTED, LoanTask, loans
from torch import Tensor

from drumline import Hook

GROUPS = 64
CUSTOMERS = 40_000
ROUNDS = 4


def nearest(rows: Tensor, centers: Tensor) -> Tensor:
    return torch.cdist(rows, centers).argmin(1)  # planted


class Groups(Hook):
    """Centers of similar customers, as the network sees them."""

    every_steps = 4 if PLANTED else 1000  # planted

    def __init__(self) -> None:
        self.rows = loans(CUSTOMERS, seed=3).tensors[0]
        self.centers = self.rows[:GROUPS].clone()

    def state_dict(self) -> dict[str, Any]:
        return {"centers": self.centers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.centers = state["centers"]

    def after_step(self, run: Any) -> None:
        network = run.model
        seen = torch.relu(self.rows @ network.first.weight[:128, : self.rows.shape[1]].detach().T)
        self.regroup(seen)  # planted: on all ranks

    def regroup(self, seen: Tensor) -> None:
        centers = seen[:GROUPS].clone()
        for _ in range(ROUNDS):
            groups = nearest(seen, centers)  # planted
            sums = torch.zeros_like(centers).index_add_(0, groups, seen)
            counts = torch.bincount(groups, minlength=GROUPS).clamp(min=1)
            centers = sums / counts[:, None]
        self.centers = centers


class Loans(LoanTask):
    def hooks(self) -> list[Hook]:
        return [Groups()]
