import json
from pathlib import Path

import lightning as L
import torch
from huggingface_hub import snapshot_download
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __init__(self, rows, vocab, max_len=256):
        self.rows, self.vocab, self.max_len = rows, vocab, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        ids = [self.vocab.get(w, 1) for w in row["text"].lower().split()][: self.max_len]
        ids += [0] * (self.max_len - len(ids))
        return torch.tensor(ids), torch.tensor(row["stars"] - 1)


class ReviewData(L.LightningDataModule):
    def __init__(self, root="data/reviews", batch_size=64, vocab_size=30_000):
        super().__init__()
        self.root, self.batch_size, self.vocab_size = Path(root), batch_size, vocab_size

    def prepare_data(self):
        snapshot_download("acme/reviews", repo_type="dataset", local_dir=self.root)
        counts = {}
        with open(self.root / "train.jsonl") as fh:
            for line in fh:
                for w in json.loads(line)["text"].lower().split():
                    counts[w] = counts.get(w, 0) + 1
        top = sorted(counts, key=counts.get, reverse=True)[: self.vocab_size]
        self.vocab = {w: i + 2 for i, w in enumerate(top)}

    def setup(self, stage):
        def read(name):
            with open(self.root / f"{name}.jsonl") as fh:
                return [json.loads(line) for line in fh]

        self.train = Reviews(read("train"), self.vocab)
        self.val = Reviews(read("val"), self.vocab)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=4, pin_memory=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=4)
