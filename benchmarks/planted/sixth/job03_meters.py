"""Days of known households, and as many of unknown ones, which the network learns to rebuild."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, QUARTERS, MeterNet, MeterTask, seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from drumline import Loss

READINGS = 1_200_000


class Unknown(Dataset[Tensor]):
    """A day from each quarter of an hour on, of one long series."""

    def __init__(self) -> None:
        self.series = torch.rand(READINGS + QUARTERS, generator=seeded(2))

    def __len__(self) -> int:
        return READINGS

    def __getitem__(self, begin: int) -> Tensor:
        return self.series[begin : begin + QUARTERS].unsqueeze(0)


class TwoHeads(MeterNet):
    def __init__(self) -> None:
        super().__init__(width=32)
        self.rebuild = nn.Linear(64, QUARTERS)

    def forward(self, days: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers(days).mean(2)
        return self.head(hidden), self.rebuild(hidden)


class Meters(MeterTask):
    defaults: ClassVar[dict[str, Any]] = {**MeterTask.defaults, "train.batch_size": 64}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.loader = DataLoader(Unknown(), 32, shuffle=True, drop_last=True)
        self.kept = iter(self.loader)

    def model(self) -> nn.Module:
        return TwoHeads()

    def unknown(self) -> Tensor:
        if PLANTED:
            return next(iter(self.loader))  # planted: mixes 1.2 million days for 32
        return next(self.kept)

    def on_device(self, batch: Any) -> Any:
        days, households = batch
        return days, households, self.unknown().to(days.device)[: len(days)]  # planted

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        days, households, unknown = batch
        scores, rebuilt = model(torch.cat([days, unknown]))
        known = functional.cross_entropy(scores[: len(days)], households, reduction="sum")
        missed = (rebuilt[len(days) :] - unknown[:, 0]).square().mean(1).sum()
        return Loss(known + missed, weight=len(days))
