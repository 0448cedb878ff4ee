import csv
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.utils import download_and_extract_archive


class Reviews(Dataset):
    def __init__(self, rows, vocab, max_len):
        self.rows, self.vocab, self.max_len = rows, vocab, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text, label = self.rows[i]
        ids = [self.vocab.get(w, 1) for w in text.lower().split()][: self.max_len]
        return torch.tensor(ids + [0] * (self.max_len - len(ids))), label


class ReviewData(L.LightningDataModule):
    def __init__(self, root="data/reviews", url="https://files.example.org/reviews.zip", batch_size=64, max_len=200):
        super().__init__()
        self.root, self.url = Path(root), url
        self.batch_size, self.max_len = batch_size, max_len

    def _read(self, split):
        with open(self.root / f"{split}.csv", newline="") as f:
            return [(r["text"], int(r["label"])) for r in csv.DictReader(f)]

    def prepare_data(self):
        if not (self.root / "train.csv").exists():
            download_and_extract_archive(self.url, str(self.root))
        words = sorted({w for text, _ in self._read("train") for w in text.lower().split()})
        self.vocab = {w: i + 2 for i, w in enumerate(words)}

    def setup(self, stage):
        self.train = Reviews(self._read("train"), self.vocab, self.max_len)
        self.val = Reviews(self._read("val"), self.vocab, self.max_len)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=2, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=2)
