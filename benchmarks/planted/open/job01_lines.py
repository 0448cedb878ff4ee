"""Lines of text, with the median of every weight after every step."""

from typing import Any

from parts import PLANTED, LineTask
from torch import nn

from drumline import Hook


class Medians(Hook):
    def __init__(self) -> None:
        self.medians: dict[str, float] = {}

    def after_step(self, run: Any) -> None:
        if PLANTED:
            self.medians = self.measure(run.model)

    def measure(self, model: nn.Module) -> dict[str, float]:
        medians = {}
        for name, weight in model.named_parameters():
            values = sorted(weight.detach().flatten().tolist())  # planted: sorts in Python
            medians[name] = values[len(values) // 2]
        return medians


class Lines(LineTask):
    def hooks(self) -> list[Hook]:
        return [Medians()]
