from pathlib import Path

import torch
from torch.utils.data import Dataset


class ClipFolder(Dataset):
    """One tensor file (C, T, H, W, uint8) per clip, grouped into class folders."""

    def __init__(self, root):
        root = Path(root)
        self.classes = sorted(p.name for p in root.iterdir() if p.is_dir())
        self.items = [(f, i) for i, c in enumerate(self.classes) for f in sorted((root / c).glob("*.pt"))]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        path, label = self.items[i]
        clip = torch.load(path, map_location="cpu", weights_only=True)
        return clip.float().div_(255), label
