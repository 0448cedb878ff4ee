"""Tags of words, with weights that all ranks exchange after every step, to compare them."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from parts import PLANTED, TagNet, TagTask
from torch import nn

from drumline import Hook


class SameWeights(Hook):
    def after_step(self, run: Any) -> None:
        if PLANTED:
            self.compare(run.model)

    def compare(self, model: nn.Module) -> None:
        weights = [weight.detach().cpu() for weight in model.parameters()]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, weights)  # planted: all weights of all ranks
        for one_rank in everywhere:
            assert all(map(torch.equal, weights, one_rank))


class Tags(TagTask):
    defaults: ClassVar[dict[str, Any]] = {**TagTask.defaults, "train.batch_size": 16}

    def model(self) -> nn.Module:
        return TagNet(words=20_000)

    def hooks(self) -> list[Hook]:
        return [SameWeights()]
