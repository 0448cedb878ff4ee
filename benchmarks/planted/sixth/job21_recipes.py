"""Recipes, with an average of the weights, without a bottleneck."""

from typing import Any, ClassVar

from parts import RecipeTask

from drumline import EMA, Hook


class Recipes(RecipeTask):
    defaults: ClassVar[dict[str, Any]] = {**RecipeTask.defaults, "train.batch_size": 48}

    def hooks(self) -> list[Hook]:
        return [EMA(0.99, every_steps=4)]
