from torch import nn


class MLP(nn.Sequential):
    def __init__(self, d=28, width=300):
        super().__init__(nn.Linear(d, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
