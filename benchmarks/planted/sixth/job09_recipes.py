"""Recipes; every few steps the network writes some of its own."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, RecipeNet, RecipeTask, recipes
from torch import Tensor, nn

from drumline import Hook, LogSamples

WRITTEN = 40


def shown(words: Tensor) -> str:
    return " | ".join(" ".join(map(str, recipe)) for recipe in words.tolist())


class Recipes(RecipeTask):
    defaults: ClassVar[dict[str, Any]] = {**RecipeTask.defaults, "train.batch_size": 24}

    def model(self) -> nn.Module:
        return RecipeNet(width=64)

    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        """Goes on with each beginning, word by word."""
        words = batch[0]
        for _ in range(WRITTEN):
            scores = model(words)[:, -1]  # planted: reads everything again for each word
            words = torch.cat([words, scores.argmax(1, keepdim=True)], dim=1)
        return words

    def hooks(self) -> list[Hook]:
        beginnings = [recipes(8).tensors[0][:, :16]]
        every_steps = 4 if PLANTED else 1000
        return [LogSamples(beginnings, show=shown, every_steps=every_steps)]  # planted
