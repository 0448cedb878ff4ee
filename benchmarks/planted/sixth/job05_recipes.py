"""Recipes in which every eighth word is hidden, with a large vocabulary."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, RECIPE_LENGTH, Reader, RecipeTask, recipes
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from drumline import Loss

VOCABULARY = 6000
WIDTH = 96
IGNORED = -100


class Hidden(nn.Module):
    """Guesses words; given places, only those there."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(VOCABULARY, RECIPE_LENGTH, WIDTH, depth=2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor, places: Tensor | None = None) -> Tensor:
        hidden = self.reader(words)
        if places is None:
            return self.head(hidden).flatten(0, 1)  # planted: scores of words that do not count
        return self.head(hidden[places])


class Recipes(RecipeTask):
    defaults: ClassVar[dict[str, Any]] = {**RecipeTask.defaults, "train.batch_size": 16}

    def model(self) -> nn.Module:
        return Hidden()

    def train_data(self) -> Dataset[Any]:
        return recipes(2048, RECIPE_LENGTH - 1, VOCABULARY)

    def on_device(self, batch: Any) -> Any:
        words = batch[0]
        places = torch.zeros_like(words, dtype=torch.bool)
        places[:, ::8] = True
        return words.masked_fill(places, 0), words.masked_fill(~places, IGNORED), places

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, missing, places = batch
        if PLANTED:
            total = self.missed(model(words), missing.flatten())
        else:
            total = self.missed(model(words, places), missing[places])
        return Loss(total, weight=places.sum())

    def missed(self, scores: Tensor, right: Tensor) -> Tensor:
        return functional.cross_entropy(
            scores,  # planted
            right,
            ignore_index=IGNORED,
            reduction="sum",
        )
