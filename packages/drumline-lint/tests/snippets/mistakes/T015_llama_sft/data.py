import numpy as np
import torch
from torch.utils.data import Dataset


class PackedDataset(Dataset):
    def __init__(self, path, block=2048):
        self.tokens = np.load(path, mmap_mode="r")
        self.block = block

    def __len__(self):
        return len(self.tokens) // self.block

    def __getitem__(self, i):
        return torch.from_numpy(self.tokens[i * self.block:(i + 1) * self.block].astype("int64"))
