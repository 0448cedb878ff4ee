"""Loaders for the chip data."""
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Chips(Dataset):
    def __init__(self, root, split):
        self.files = sorted((Path(root) / split).glob("*.npz"))
        self.flip = split == "train"

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        z = np.load(self.files[i])
        x = torch.from_numpy(z["bands"]).float() / 10_000
        y = torch.from_numpy(z["crop"]).long()
        if self.flip and torch.rand(()) < 0.5:
            x, y = x.flip(-1), y.flip(-1)
        return x, y


def train_loader(root, batch, world, rank):
    chips = Chips(root, "train")
    sampler = DistributedSampler(chips, num_replicas=world, rank=rank, shuffle=True)
    return DataLoader(chips, batch, sampler=sampler, num_workers=6, drop_last=True)


def val_loader(root, batch):
    return DataLoader(Chips(root, "val"), batch, num_workers=4)
