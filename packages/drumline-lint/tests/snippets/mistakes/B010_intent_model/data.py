import json

import torch
from torch.utils.data import DataLoader, Dataset


class Utterances(Dataset):
    def __init__(self, path, tokenizer, max_len=64):
        with open(path) as f:
            self.rows = [json.loads(line) for line in f]
        self.tok, self.max_len = tokenizer, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        enc = self.tok(row["text"], truncation=True, max_length=self.max_len, padding="max_length")
        return torch.tensor(enc["input_ids"]), torch.tensor(enc["attention_mask"]), row["intent"]


def build_loader(path, tokenizer, batch_size):
    return DataLoader(
        Utterances(path, tokenizer),
        batch_size=batch_size,
        shuffle=True,
        num_workers=4,
        pin_memory=True,
        drop_last=True,
    )
