import torch
from torch import nn
from torch.utils.data import Dataset


class Clicks(Dataset):
    def __init__(self, path):
        blob = torch.load(path, map_location="cpu")
        self.user, self.item, self.label = blob["user"], blob["item"], blob["label"].float()

    def __len__(self):
        return len(self.label)

    def __getitem__(self, k):
        return self.user[k], self.item[k], self.label[k]


class TwoTower(nn.Module):
    def __init__(self, users, items, dim=64):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias
