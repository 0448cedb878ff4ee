"""Telling images apart: `digits`, `cifar10`, an image folder, or images of the user's own."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from drumline.errors import UsageError
from drumline.tasks.base import Loss
from drumline.tasks.configured import ConfiguredTask


class ImageClassification(ConfiguredTask):
    """Cross entropy and accuracy. A batch is (images, labels); the model gives a score per class."""

    best_metric = "accuracy"
    higher_is_better = True

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        images, labels = batch
        scores = model(images)
        if scores.dim() != 2:
            raise UsageError(
                f"the model gave scores of shape {list(scores.shape)}; to tell images apart it takes [N, classes]",
                next_step="check --model.name; a language model goes with the task `text`",
            )
        return Loss(
            functional.cross_entropy(scores, labels, reduction="sum"),
            metrics={"accuracy": (scores.argmax(dim=1) == labels).sum()},
        )
