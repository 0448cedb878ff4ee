import numpy as np
import torch
from torch.utils.data import Dataset


class PackedTokens(Dataset):
    """uint16 token file, cut into fixed blocks."""

    def __init__(self, path, block=2048):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")
        self.block = block

    def __len__(self):
        return len(self.data) // self.block

    def __getitem__(self, i):
        chunk = self.data[i * self.block:(i + 1) * self.block]
        return torch.from_numpy(chunk.astype(np.int64))
