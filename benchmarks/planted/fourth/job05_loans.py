"""Loans, with a deep and narrow network, and tiny buckets for its gradients."""

from typing import Any, ClassVar

from parts import PLANTED, LoanNet, LoanTask, calmed
from torch import nn


class Loans(LoanTask):
    defaults: ClassVar[dict[str, Any]] = {
        **LoanTask.defaults,
        "train.batch_size": 512,
        "dist.bucket_cap_mb": 0.001 if PLANTED else 25.0,  # planted: one for each parameter
        "optim.lr": 0.001,
    }

    def model(self) -> nn.Module:
        return calmed(LoanNet(hidden=40, depth=150))
