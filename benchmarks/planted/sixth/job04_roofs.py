"""Roofs, of which a network that is already trained makes features."""

from typing import Any, ClassVar

import torch
from parts import PLANTED, ROOFS, RoofTask, convolution, roofs
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

FEATURES = 48


class Trained(nn.Module):
    """Stands for a large network from elsewhere; its weights never change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            convolution(3, 32, 2),
            convolution(32, 48),
            convolution(48, 48),
            convolution(48, 48),
            convolution(48, FEATURES, 2),
        )

    @torch.no_grad()
    def features(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures)  # planted: the same pictures in every epoch


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(convolution(FEATURES, 32), convolution(32, 32))
        self.head = nn.Linear(32, ROOFS)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.layers(features).mean((2, 3)))


class Roofs(RoofTask):
    defaults: ClassVar[dict[str, Any]] = {**RoofTask.defaults, "train.batch_size": 64}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        torch.manual_seed(5)
        self.trained = Trained().eval()

    def model(self) -> nn.Module:
        return Small()

    def train_data(self) -> Dataset[Any]:
        data = roofs(512)
        if PLANTED:
            return data
        pictures, kinds = data.tensors
        return TensorDataset(self.trained.features(pictures), kinds)

    def on_device(self, batch: Any) -> Any:
        if not PLANTED:
            return batch
        pictures, kinds = batch
        return self.trained.to(pictures.device).features(pictures), kinds  # planted
