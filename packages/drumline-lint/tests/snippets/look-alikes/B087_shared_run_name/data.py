from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset


class ArrayDataset(Dataset):
    """x/y arrays stored as <root>/<split>_x.npy and <root>/<split>_y.npy."""

    def __init__(self, root, split):
        root = Path(root)
        self.x = np.load(root / f"{split}_x.npy", mmap_mode="r")
        self.y = np.load(root / f"{split}_y.npy", mmap_mode="r")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = torch.from_numpy(np.array(self.x[i], dtype=np.float32))
        return x, int(self.y[i])
