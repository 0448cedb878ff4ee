"""The data and the network of the examples: points on three interleaved spirals, to be classified."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def spirals(num_points: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (num_points,), generator=random)
    radius = torch.rand(num_points, generator=random)
    angle = 2.1 * arm + 5.0 * radius + 0.1 * torch.randn(num_points, generator=random)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points, arm)


class Net(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 3)
        )

    def forward(self, points: Tensor) -> Tensor:
        return self.layers(points)
