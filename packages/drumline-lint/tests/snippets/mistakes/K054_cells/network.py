import torch
from torch import nn
from torch.utils.data import Dataset


class Wells(Dataset):
    def __init__(self, path):
        d = torch.load(path, map_location="cpu")
        self.img, self.n = d["img"].float(), d["count"]

    def __len__(self):
        return len(self.n)

    def __getitem__(self, i):
        return self.img[i], self.n[i]


class CellCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU())
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        return self.out(self.conv(x).mean((2, 3))).squeeze(1)
