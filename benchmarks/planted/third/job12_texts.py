"""A small GPT, with three numbers about each batch beside the loss."""

from collections.abc import Callable
from typing import Any

import torch
from parts import PLANTED, TextTask, text_loss
from torch import Tensor, nn

from drumline import Loss


def correct(scores: Tensor, targets: Tensor) -> Tensor:
    return (scores.argmax(2) == targets).sum()


def among_first_five(scores: Tensor, targets: Tensor) -> Tensor:
    return (scores.topk(5, dim=2).indices == targets[:, :, None]).sum()


def sure(scores: Tensor, targets: Tensor) -> Tensor:
    return scores.amax(2).sum() - scores.mean(2).sum() + 0 * targets.sum()


NUMBERS = {"correct": correct, "first_five": among_first_five, "sure": sure}


@torch.no_grad()
def number_of(measure: Callable[..., Tensor], model: nn.Module, tokens: Tensor) -> Tensor:
    return measure(model(tokens[:, :-1]), tokens[:, 1:])  # planted: a forward pass for each


class Texts(TextTask):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens = batch[0]
        targets = tokens[:, 1:]
        scores = model(tokens[:, :-1])
        total = text_loss(scores, tokens, "sum")
        weight = targets.numel()
        # All are divided by the same weight.
        metrics: dict[str, Any] = {}
        for name, measure in NUMBERS.items():
            if PLANTED:
                metrics[name] = number_of(measure, model, tokens)  # planted
            else:
                metrics[name] = measure(scores.detach(), targets)
        return Loss(total, weight=weight, metrics=metrics)
