from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Streets(Dataset):
    def __init__(self, root):
        self.items = sorted(Path(root, "train").glob("*.npz"))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        z = np.load(self.items[index])
        return torch.from_numpy(z["image"]).float() / 255, torch.from_numpy(z["mask"]).long()


def make_train_loader(root, batch_size):
    dataset = Streets(root)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=6,
        pin_memory=True,
        drop_last=True,
    )
