"""Predicting the next token: `text`, or tokens of the user's own."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

from drumline.errors import UsageError
from drumline.tasks.base import Loss
from drumline.tasks.configured import ConfiguredTask


class LanguageModel(ConfiguredTask):
    """Cross entropy per token, and perplexity. A batch is (tokens, the token that follows each)."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        tokens, following = batch
        scores = model(tokens)
        if scores.dim() != 3:
            raise UsageError(
                f"the model gave scores of shape {list(scores.shape)}; to predict tokens it takes [N, T, vocabulary]",
                next_step="check --model.name; an image model goes with a task such as `digits`",
            )
        # Every sample has the same number of tokens, so a sample's loss is the mean over its tokens and all samples
        # weigh the same: without a weight there is no collective in every step to add weights up over the ranks.
        total = functional.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum")
        return Loss(total / following.shape[1])

    def report(self, means: dict[str, float]) -> dict[str, float]:
        loss = means["loss"]
        return {**means, "perplexity": math.inf if loss > 700 else math.exp(loss)}
