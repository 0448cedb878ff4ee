"""Reviews, with hooks on the layers that were left from a search for large numbers."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, ReviewNet, ReviewTask
from torch import Tensor, nn

PARTS = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99])


class Activity:
    """What lies in the outputs of each layer."""

    def __init__(self) -> None:
        self.latest: dict[str, list[float]] = {}

    def watch(self, network: nn.Module) -> None:
        for name, module in network.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(self.recorder(name))  # planted

    def recorder(self, name: str) -> Any:
        def record(module: nn.Module, inputs: Any, outputs: Tensor) -> None:
            values = outputs.detach().flatten()
            ordered = values.sort().values  # planted: of every layer, in every step
            places = (PARTS * (len(ordered) - 1)).long()
            self.latest[name] = ordered[places].tolist()

        return record


class Reviews(ReviewTask):
    defaults: ClassVar[dict[str, Any]] = {**ReviewTask.defaults, "train.batch_size": 48}

    def model(self) -> nn.Module:
        network = ReviewNet()
        if PLANTED:
            Activity().watch(network)  # planted
        return network
