import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Tokens(Dataset):
    def __init__(self, path, n=1024):
        self.arr, self.n = np.memmap(path, dtype=np.uint16, mode="r"), n

    def __len__(self):
        return (len(self.arr) - 1) // self.n

    def __getitem__(self, i):
        t = torch.from_numpy(self.arr[i * self.n:(i + 1) * self.n + 1].astype(np.int64))
        return t[:-1], t[1:]


def token_loader(path, batch_size):
    ds = Tokens(path)
    sampler = DistributedSampler(ds, shuffle=True, seed=0, drop_last=True)
    return DataLoader(ds, batch_size, sampler=sampler, num_workers=2, drop_last=True), sampler
