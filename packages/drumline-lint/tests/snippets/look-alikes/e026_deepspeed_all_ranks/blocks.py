import numpy as np
import torch
from torch.utils.data import Dataset


class TokenBlocks(Dataset):
    def __init__(self, path, block=2048):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")
        self.block = block

    def __len__(self):
        return len(self.data) // self.block

    def __getitem__(self, i):
        return torch.from_numpy(self.data[i * self.block:(i + 1) * self.block].astype(np.int64))
