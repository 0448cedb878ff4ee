import torch
from torch import nn
from torch.utils.data import TensorDataset


class Regressor(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(100, 256), nn.Tanh(), nn.Linear(256, 10))


def curves(path):
    d = torch.load(path, map_location="cpu", weights_only=True)
    return TensorDataset(d["x"], d["y"])
