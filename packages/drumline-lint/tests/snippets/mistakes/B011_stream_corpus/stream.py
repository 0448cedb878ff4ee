import gzip
import json
import random

import torch
from torch.utils.data import IterableDataset


class JsonlStream(IterableDataset):
    """Tokenizes gzip'd jsonl shards on the fly and packs them into blocks."""

    def __init__(self, files, tokenizer, block_size, seed=0):
        self.files = sorted(files)
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        files = list(self.files)
        random.Random(self.seed + self.epoch).shuffle(files)
        buf = []
        for path in files:
            with gzip.open(path, "rt") as f:
                for line in f:
                    buf += self.tokenizer(json.loads(line)["text"])["input_ids"] + [self.tokenizer.eos_token_id]
                    while len(buf) > self.block_size:
                        yield torch.tensor(buf[: self.block_size + 1])
                        buf = buf[self.block_size :]
