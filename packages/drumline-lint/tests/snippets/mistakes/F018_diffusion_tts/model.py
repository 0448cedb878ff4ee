from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import Dataset


class MelDataset(Dataset):
    def __init__(self, root, frames=256):
        self.files = sorted(Path(root).glob("*.npy"))
        self.frames = frames

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        mel = torch.from_numpy(np.load(self.files[i])).float()
        start = torch.randint(0, max(1, mel.size(1) - self.frames), (1,)).item()
        mel = mel[:, start:start + self.frames]
        return nn.functional.pad(mel, (0, self.frames - mel.size(1)))


class Denoiser(nn.Module):
    def __init__(self, dim, mels=80, depth=10):
        super().__init__()
        self.inp = nn.Conv1d(mels, dim, 1)
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList(nn.Conv1d(dim, dim, 3, padding=2 ** (i % 5), dilation=2 ** (i % 5))
                                    for i in range(depth))
        self.out = nn.Conv1d(dim, mels, 1)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t[:, None]).unsqueeze(-1)
        for layer in self.layers:
            h = h + nn.functional.silu(layer(h))
        return self.out(h)
