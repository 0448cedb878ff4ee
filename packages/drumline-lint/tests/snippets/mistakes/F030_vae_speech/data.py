from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Mels(Dataset):
    def __init__(self, root, frames=200):
        self.files = sorted(Path(root).rglob("*.npy"))
        self.frames = frames

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        mel = np.load(self.files[i], mmap_mode="r")
        start = np.random.randint(0, max(1, len(mel) - self.frames))
        clip = torch.zeros(self.frames, mel.shape[1])
        part = torch.from_numpy(np.array(mel[start:start + self.frames], dtype=np.float32))
        clip[:len(part)] = part
        return clip


def make_loader(root, batch_size):
    data = Mels(root)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    return sampler, DataLoader(data, batch_size, sampler=sampler, num_workers=4, drop_last=True)
