"""The task for made-up data, images or tokens, in trials of speed and of a cluster."""

from __future__ import annotations

from typing import Any

from torch import nn

from drumline.config.schema import Config
from drumline.tasks.base import Loss
from drumline.tasks.classification import ImageClassification
from drumline.tasks.configured import ConfiguredTask
from drumline.tasks.language import LanguageModel


class Synthetic(ConfiguredTask):
    """Tells images apart, or with `data.name` `synthetic_tokens` predicts tokens. The best one has the lowest loss."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        has_tokens = config.data.name == "synthetic_tokens"
        self._kind: ConfiguredTask = LanguageModel(config) if has_tokens else ImageClassification(config)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return self._kind.loss(model, batch)

    def report(self, means: dict[str, float]) -> dict[str, float]:
        return self._kind.report(means)
