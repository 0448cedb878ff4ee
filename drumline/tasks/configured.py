"""What the built-in tasks share: the model and the data that the configuration names."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn

from drumline.data import registry as datasets
from drumline.data.dataset import Split
from drumline.models import registry as models
from drumline.tasks.base import Task

# What a dataset may tell about itself that a model needs to know.
_FACTS = ("in_channels", "num_classes", "vocab_size")


class ConfiguredTask(Task):
    """The dataset is `data.name`, the model is `model.name`, made to fit it."""

    def model(self) -> nn.Module:
        settings = dict(vars(self.config.model))
        name, options = settings.pop("name"), settings.pop("options")
        data = self.train_data()
        facts = {fact: getattr(data, fact) for fact in _FACTS if hasattr(data, fact)}
        return models.build(name, facts=facts, settings=settings, options=options)

    def train_data(self) -> Any:
        return self._train_data

    def eval_data(self) -> Any:
        return self._build_data("eval")

    @cached_property
    def _train_data(self) -> Any:
        # Read once, though the engine and the model both ask.
        return self._build_data("train")

    def _build_data(self, split: Split) -> Any:
        data = self.config.data
        return datasets.build(
            data.name,
            split=split,
            dir=data.dir,
            augment=data.augment,
            image_size=data.image_size,
            samples=data.samples,
            classes=data.classes,
            token_type=data.token_type,
            context=self.config.model.context,
            seed=self.config.train.seed,
        )
