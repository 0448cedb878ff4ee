import torch
from torch import nn
from torch.utils.data import Dataset


class Pairs(Dataset):
    def __init__(self, path):
        d = torch.load(path, map_location="cpu")
        self.a, self.y = d["a"], d["y"]

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return self.a[i], self.y[i]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(300, 600), nn.GELU(), nn.Linear(600, 64))

    def forward(self, x):
        return self.net(x)
