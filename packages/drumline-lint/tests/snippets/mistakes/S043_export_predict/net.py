import h5py
import torch
from torch import nn
from torch.utils.data import Dataset


class SpotDataset(Dataset):
    def __init__(self, path):
        with h5py.File(path) as f:
            self.x, self.y = torch.from_numpy(f["img"][:]), torch.from_numpy(f["heat"][:])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i][None].float() / 65535, self.y[i][None].float()


class SpotDetector(nn.Module):
    def __init__(self, w=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, w, 5, padding=2), nn.ReLU(),
            nn.Conv2d(w, w, 3, padding=1), nn.ReLU(),
            nn.Conv2d(w, w, 3, padding=2, dilation=2), nn.ReLU(),
            nn.Conv2d(w, 1, 1))

    def forward(self, x):
        return self.net(x)
