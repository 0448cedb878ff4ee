"""A text cut into blocks of characters."""

import random

import torch
from torch.utils.data import Dataset, Subset


def sample_text(length):
    words = ["drum", "line", "rank", "node", "beat", "step"]
    draw = random.Random(5)
    return " ".join(draw.choice(words) for _ in range(length // 5))


class CharDataset(Dataset):
    def __init__(self, text, block_size):
        letters = sorted(set(text))
        self.index = {letter: number for number, letter in enumerate(letters)}
        self.vocab_size = len(letters)
        self.block_size = block_size
        self.codes = torch.tensor([self.index[letter] for letter in text])

    def __len__(self):
        return len(self.codes) - self.block_size

    def __getitem__(self, start):
        piece = self.codes[start : start + self.block_size + 1]
        return piece[:-1], piece[1:]


def split(dataset, share):
    cut = int(len(dataset) * share)
    return Subset(dataset, range(cut)), Subset(dataset, range(cut, len(dataset)))
