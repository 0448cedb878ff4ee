"""IAM lines as grey images of height 64."""
from pathlib import Path

import torch
from torch.utils.data import Dataset


class IamLines(Dataset):
    def __init__(self, root, split):
        self.files = sorted((Path(root) / split).glob("*.pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = torch.load(self.files[i], map_location="cpu")
        return d["image"].float() / 255, d["text"].long()


def pad_lines(rows):
    width = max(img.shape[-1] for img, _ in rows)
    imgs = torch.zeros(len(rows), 1, 64, width)
    for k, (img, _) in enumerate(rows):
        imgs[k, 0, :, : img.shape[-1]] = img
    text = torch.cat([t for _, t in rows])
    img_len = torch.full((len(rows),), width // 4, dtype=torch.long)
    text_len = torch.tensor([len(t) for _, t in rows])
    return imgs, text, img_len, text_len
