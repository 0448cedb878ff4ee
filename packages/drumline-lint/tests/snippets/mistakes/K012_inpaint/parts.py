import glob

import torch
from torch import nn
from torch.utils.data import Dataset


class Holes(Dataset):
    def __init__(self, root):
        self.files = sorted(glob.glob(f"{root}/*.pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        img = torch.load(self.files[i], map_location="cpu")
        mask = (torch.rand(1, *img.shape[1:]) > 0.25).float()
        return img, mask


class Inpainter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, 64, 5, padding=2), nn.ReLU(),
                                 nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 3, 1))

    def forward(self, img, mask):
        return self.net(torch.cat([img, mask], 1))
