from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms


class CaptionedImages(Dataset):
    def __init__(self, root, tokenizer, size=512):
        self.files = sorted(Path(root).glob("*.jpg"))
        self.tok = tokenizer
        self.tf = transforms.Compose([
            transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor(), transforms.Normalize(0.5, 0.5),
        ])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        caption = self.files[i].with_suffix(".txt").read_text().strip()
        ids = self.tok(caption, padding="max_length", truncation=True, max_length=77, return_tensors="pt").input_ids[0]
        return {"pixel_values": self.tf(Image.open(self.files[i]).convert("RGB")), "input_ids": ids}


def collate(rows):
    return {k: torch.stack([r[k] for r in rows]) for k in rows[0]}
